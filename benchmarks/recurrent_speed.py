"""Compare three ways to run models with recurrent layers: all layers in one native call; one operation at a time, with
the native kernels of recurrent layers; and the same with torch operations in their place.

python -m benchmarks.recurrent_speed --shape lfm2

The models have random weights, quantized while loading. The ways take turns; products and attention run natively in all
of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paged_sdk import IsqType
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.recurrent import StatefulBackend
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.torch_threads import use_threads
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.system.processors import usable_processors
from paged_sdk.types.step import StepRow

__all__ = ["SHAPES"]

_ATTENDING: Final = (2, 5, 8, 10, 12, 14)
SHAPES: Final[MappingProxyType[str, dict[str, Any]]] = MappingProxyType(
    {
        "lfm2": {  # LFM2-350M
            "model_type": "lfm2",
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "layer_types": ["full_attention" if layer in _ATTENDING else "conv" for layer in range(16)],
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 65_536,
        },
        "qwen3.5": {  # Qwen3.5-0.8B, with a smaller vocabulary
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": True,
            "vocab_size": 65_536,
        },
        "granite-4.0-h-350m": {  # with a smaller vocabulary
            "model_type": "granitemoehybrid",
            "hidden_size": 768,
            "num_hidden_layers": 32,
            "layer_types": [
                "full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)
            ],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
            "vocab_size": 65_536,
        },
    }
)
_BLOCK: Final = 32
_CONTEXT: Final = 1024
"""Tokens of each stream's part of the KV cache."""
_WAYS: Final = ("torch", "kernels", "one call")


class _RandomSource:
    """Gives tensors of a model's names and shapes with random content, as a checkpoint would."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self._shapes = shapes

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (torch.randn(self._shapes[name]) * 0.02).to(dtype=dtype, device=device)

    def matrix(self, name: str) -> StoredMatrix:
        return DenseMatrix((torch.randn(self._shapes[name]) * 0.02).flatten(0, -2).to(torch.bfloat16))

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _model(shape: str, isq: IsqType, workspace: Workspace) -> DecoderModel:
    config = AutoConfig.for_model(**SHAPES[shape])
    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        reference = auto_model.from_config(config)
    shapes = {name: tensor.shape for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    source = _RandomSource(shapes)  # the output projection is the embedding
    torch.manual_seed(0)
    policy = WeightPolicy(workspace=workspace, isq=isq)
    return load_model(
        config.to_dict(), source, dtype=torch.bfloat16, placement=torch.device("cpu"), policy=policy, num_threads=1
    )


class _Stepper:
    """Computes steps of a model with memory of its own.

    :param way: one of :data:`_WAYS`
    """

    def __init__(self, model: DecoderModel, workspace: Workspace, streams: int, way: str) -> None:
        config, cpu = model.config, torch.device("cpu")
        self._blocks = _CONTEXT // _BLOCK
        inner = NativePagedBackend(
            config.of_layers(config.attention_layers),
            PoolSettings(block_size=_BLOCK, dtype=model.dtype, device=cpu),
            streams * self._blocks,
            workspace=workspace,
            precision=Precision.INT8,
        )
        self._backend = StatefulBackend(
            inner,
            config,
            num_slots=streams,
            dtype=model.dtype,
            device=cpu,
            workspace=None if way == "torch" else workspace,
        )
        self._model: DecoderModel | FusedDecoderModel = model
        if way == "one call":
            self._model = FusedDecoderModel(model, self._backend)

    @torch.inference_mode()
    def run(self, streams: int, start: int, count: int) -> None:
        """Compute one step of ``count`` tokens of each stream, after ``start`` tokens."""
        rows = [
            StepRow(
                stream,
                start,
                [7] * count,
                range(stream * self._blocks, (stream + 1) * self._blocks),
                start + count,
                state_slot=stream,
            )
            for stream in range(streams)
        ]
        context = StepContext(attention=self._backend.prepare(rows))
        positions = torch.arange(start, start + count).repeat(streams)
        hidden = self._model.forward(torch.arange(streams * count) % 1000, positions, context)
        self._model.logits(hidden[count - 1 :: count])


def _turns(steppers: Sequence[_Stepper], step: tuple[int, int, int], rounds: int, repeats: int) -> list[list[float]]:
    """Return the seconds of a step of each stepper, one number per round, after one that warms up.

    :param step: streams, tokens before, and tokens of each
    """
    times = [list[float]() for _ in steppers]
    for turn in range(rounds + 1):
        for stepper, own in zip(steppers, times, strict=True):
            began = time.perf_counter()
            for _ in range(repeats):
                stepper.run(*step)
            if turn > 0:
                own.append((time.perf_counter() - began) / repeats)
    return times


def main(
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}")] = "lfm2",
    isq: Annotated[IsqType, typer.Option(help="type of the weights")] = IsqType.Q4K,
    streams: Annotated[str, typer.Option(help="numbers of streams that decode, with commas")] = "1,8",
    prompt: Annotated[int, typer.Option(help="tokens of a prefill")] = 500,
    rounds: Annotated[int, typer.Option(help="turns of each")] = 5,
    threads: Annotated[int | None, typer.Option(help="default: all usable processors")] = None,
) -> None:
    """Print the time of a step, and the ratio of neighbouring turns."""
    library = load()
    if library is None:
        raise typer.BadParameter("the native library is not built")
    workspace = Workspace(library, num_threads=threads or usable_processors())
    use_threads(1)
    model = _model(shape, isq, workspace)
    cases = [(f"decode of {count}", count, 1, 20) for count in map(int, streams.split(","))]
    cases.append((f"prefill of {prompt}", 1, prompt, 1))
    columns = (f"{way}, ms" for way in _WAYS)
    table = Table("step", *columns, "one call beside kernels: min, median, max", title=f"{shape}, {isq.name}")
    for name, count, tokens, repeats in track(cases, console=Console(stderr=True)):
        start = _CONTEXT // 2 if tokens == 1 else 0
        steppers = [_Stepper(model, workspace, count, way) for way in _WAYS]
        times = _turns(steppers, (count, start, tokens), rounds, repeats)
        ratios = sorted(apart / together for apart, together in zip(*times[1:], strict=True))
        medians = (f"{statistics.median(own) * 1e3:.2f}" for own in times)
        table.add_row(name, *medians, f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
