"""No kernel is compiled for a request: the steps for trial have launched all that its steps may launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kv.manager import KvCopy
from paged_sdk.runner.device_decoding import Way
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.warm_up import run_for_trial, trial_steps
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.types.step import StepRow

HIDDEN, HEAD, MLP, VOCAB, EXPERTS = 512, 64, 512, 64, 8
LLAMA: Final[dict[str, Any]] = {
    "llama.context_length": 32_768,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 2,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": HEAD,
    "llama.attention.value_length": HEAD,
    "llama.rope.dimension_count": HEAD,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors(num_experts: int, num_heads: int, mlp: int = MLP) -> dict[str, npt.NDArray[np.float32]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(2):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (num_heads * HEAD, HIDDEN),
            "attn_k": (2 * HEAD, HIDDEN),
            "attn_v": (2 * HEAD, HIDDEN),
            "attn_output": (HIDDEN, num_heads * HEAD),
            "ffn_norm": (HIDDEN,),
        }
        matrices: dict[str, tuple[int, ...]] = {
            "ffn_gate": (mlp, HIDDEN),
            "ffn_up": (mlp, HIDDEN),
            "ffn_down": (HIDDEN, mlp),
        }
        if num_experts:
            block["ffn_gate_inp"] = (num_experts, HIDDEN)
            matrices = {f"{name}_exps": (num_experts, *shape) for name, shape in matrices.items()}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in (block | matrices).items()}
    return {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}


def stored_as(name: str, array: npt.NDArray[np.float32]) -> gguf.GGMLQuantizationType:
    """Return the type to store a tensor as: no other matrix has that of the output projection, as in Q4_K_M."""
    if array.ndim == 1 or "inp" in name:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.Q4_0 if name == "output.weight" else gguf.GGMLQuantizationType.Q8_0


def write(path: Path, num_experts: int, num_heads: int, mlp: int = MLP) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (LLAMA | {"llama.feed_forward_length": mlp}).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_head_count(num_heads)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
    for name, array in tensors(num_experts, num_heads, mlp).items():
        kind = stored_as(name, array)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def asked_for(
    path: Path, cache_type: PagedCacheType, windows: list[int | None], dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Return the kernels that are compiled for trial and for requests, and what is counted of them."""
    root = Path(__file__).parents[2]
    paths = (root / "src", root, os.environ.get("PYTHONPATH", ""))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("live_compilations.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path), cache_type.value, json.dumps(windows), dtype],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("num_experts", "num_heads", "cache_type", "windows"),
    [
        (0, 8, PagedCacheType.AUTO, [None, 1024]),
        (0, 6, PagedCacheType.AUTO, [1024, 1024]),
        pytest.param(0, 8, PagedCacheType.F8E4M3, [None, 1024], marks=pytest.mark.long),
        pytest.param(EXPERTS, 8, PagedCacheType.AUTO, [None, 1024], marks=pytest.mark.long),
    ],
)
def test_no_kernel_is_compiled_for_requests(
    tmp_path: Path, num_experts: int, num_heads: int, cache_type: PagedCacheType, windows: list[int | None]
) -> None:
    found = asked_for(write(tmp_path / "model.gguf", num_experts, num_heads), cache_type, windows)
    expected = {"_rms_norm_kernel", "_attend_split", "_attend_tile", "_tile_kernel", "_few_rows_kernel"}
    expected |= {"_copy_blocks_kernel", "_tile_argmax_kernel", "_draw_kernel", "_penalize_kernel"}
    assert expected | ({"_route_kernel"} if num_experts else set()) <= set(found["for trial"])
    assert found["at once"] == 2
    assert expected <= set(found["for trial"])
    assert 10 < found["counted"] <= len(found["for trial"])  # two threads may compile one for themselves
    assert found["for requests"] == []
    assert found["noticed"] == 0


def test_none_is_compiled_for_float32_either(tmp_path: Path) -> None:
    """Its tiles have 32 rows at most: each number of tiles cuts the sums otherwise that kernels join."""
    found = asked_for(write(tmp_path / "model.gguf", 0, 8, 8192), PagedCacheType.AUTO, [None, 1024], "float32")
    assert {"_tile_kernel", "_join_kernel"} <= set(found["for trial"])
    assert found["for requests"] == []


class Kernels:
    """Counts what a test says there is."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {"_old": 3}

    @property
    def total(self) -> int:
        return sum(self.found.values())

    def by_name(self) -> dict[str, int]:
        return dict(self.found)


def test_kernels_that_requests_wait_for_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels()
    live = LiveCompilations(kernels)
    kernels.found["_of_another_model"] = 4
    with live.watching():
        pass
    assert live.count == 0
    assert not caplog.records
    for count in (1, 3):
        with live.watching():
            kernels.found["_new"] = count
    assert live.count == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "2 kernels were compiled or loaded (_new): 3 since" in caplog.records[-1].message


def test_kernels_that_copy_blocks_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels()
    backend, sampler, path = MagicMock(), MagicMock(), MagicMock()
    backend.copy = lambda copies: kernels.found.update(_copy=len(copies))
    path.way = lambda scheduled: Way.LAUNCHED
    path.compilations = LiveCompilations(kernels)
    runner = ModelRunner(MagicMock(), backend, sampler, path)
    runner.submit(SchedulerOutput([], [KvCopy(0, 1, 4)], [], [], []))
    assert path.compilations.count == 1
    assert "(_copy)" in caplog.text


class Slow:
    """Stands in for a model whose steps wait for each other, as long as they may run at once.

    :ivar most_tokens: how many were under way at once
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.most_tokens = self._tokens = 0
        self.num_steps = 0
        self._lock = threading.Lock()

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: object) -> Tensor:
        with self._lock:
            self._tokens += len(token_ids)
            self.most_tokens = max(self.most_tokens, self._tokens)
            self.num_steps += 1
        if len(token_ids) == 13:
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = torch.rand(200, 200).matrix_exp().sum() + torch.zeros(len(token_ids), 1)
        with self._lock:
            self._tokens -= len(token_ids)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class NoBackend:
    def prepare(self, rows: object) -> None:
        """Keep nothing."""

    def copy(self, copies: object) -> None:
        """Have nothing to copy."""


def test_steps_at_once_have_no_more_tokens_than_the_largest() -> None:
    model: Any = Slow()
    backend: Any = NoBackend()
    steps = [[StepRow(-1, 0, [0] * count, [0], count)] for count in (1, 3, 4, 5, 2, 9, 1, 4, 4, 4)]
    told: list[tuple[int, int]] = []
    run_for_trial(model, backend, steps, lambda done, total: told.append((done, total)), num_threads=4)
    assert told == [(done, 10) for done in range(1, 11)]
    assert model.num_steps == 10
    assert model.most_tokens <= 9


def test_a_step_without_memory_ends_the_trial() -> None:
    model: Any = Slow()
    backend: Any = NoBackend()
    steps = [[StepRow(-1, 0, [0] * count, [0], count)] for count in (1, 13, *[13] * 40)]
    with pytest.raises(torch.OutOfMemoryError):
        run_for_trial(model, backend, steps, num_threads=2)
    assert model.num_steps == 2


@pytest.mark.parametrize("limits", [(1, 1, 1), (2048, 32, 40_960), (512, 256, 600), (64, 100, 4096), (8, 4, 3)])
def test_steps_for_trial_are_steps_that_an_engine_may_make(limits: tuple[int, int, int]) -> None:
    max_num_tokens, max_num_rows, max_model_len = limits
    steps = list(
        trial_steps(block_size=4, max_num_tokens=max_num_tokens, max_num_rows=max_num_rows, max_model_len=max_model_len)
    )
    assert steps
    for rows in steps:
        assert 0 < len(rows) <= max_num_rows
        assert sum(row.num_new_tokens for row in rows) <= max_num_tokens
        assert sorted(row.seq_id for row in rows) == [*range(-len(rows), 0)]
        counts = [row.num_new_tokens for row in rows]
        assert 1 not in counts[next((i for i, count in enumerate(counts) if count > 1), len(counts)) :]
        for row in rows:
            assert row.seq_id < 0 <= row.start
            assert row.end <= max_model_len
            assert len(row.kv_ids) == -(-row.end // 4)
    assert max(row.num_new_tokens for rows in steps for row in rows) == min(max_num_tokens, max_model_len)
    assert max(len(rows) for rows in steps) == min(max_num_rows, max_num_tokens)
