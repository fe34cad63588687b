"""No kernel is compiled for a request: the steps for trial have launched all that its steps may launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton")

from paged_sdk.runner.warm_up import trial_steps

HIDDEN, MLP, VOCAB, EXPERTS = 512, 512, 64, 8
LLAMA: Final[dict[str, Any]] = {
    "llama.context_length": 32_768,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 2,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors(num_experts: int) -> dict[str, npt.NDArray[np.float32]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(2):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 4, HIDDEN),
            "attn_v": (HIDDEN // 4, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
        }
        matrices: dict[str, tuple[int, ...]] = {
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        if num_experts:
            block["ffn_gate_inp"] = (num_experts, HIDDEN)
            matrices = {f"{name}_exps": (num_experts, *shape) for name, shape in matrices.items()}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in (block | matrices).items()}
    return {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(path: Path, num_experts: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
    for name, array in tensors(num_experts).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim > 1 and "inp" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def asked_for(path: Path) -> dict[str, list[str]]:
    """Return the kernels that are compiled for trial and for requests."""
    root = Path(__file__).parents[2]
    paths = (root / "src", root, os.environ.get("PYTHONPATH", ""))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("live_compilations.py")), str(path)],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("num_experts", [0, pytest.param(EXPERTS, marks=pytest.mark.long)])
def test_no_kernel_is_compiled_for_requests(tmp_path: Path, num_experts: int) -> None:
    found = asked_for(write(tmp_path / "model.gguf", num_experts))
    expected = {"_rms_norm_kernel", "_attend_split", "_attend_tile", "_tile_kernel", "_few_rows_kernel"}
    assert expected | ({"_route_kernel"} if num_experts else set()) <= set(found["for trial"])
    assert found["for requests"] == []


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
        assert len({row.seq_id for row in rows}) == len(rows)
        counts = [row.num_new_tokens for row in rows]
        assert 1 not in counts[next((i for i, count in enumerate(counts) if count > 1), len(counts)) :]
        for row in rows:
            assert row.seq_id < 0 <= row.start
            assert row.end <= max_model_len
            assert len(row.kv_ids) == -(-row.end // 4)
    assert max(row.num_new_tokens for rows in steps for row in rows) == min(max_num_tokens, max_model_len)
    assert max(len(rows) for rows in steps) == min(max_num_rows, max_num_tokens)
