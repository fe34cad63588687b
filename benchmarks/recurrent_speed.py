"""Compare three ways to run models with recurrent layers: all layers in one native call; one operation at a time, with
the native kernels of recurrent layers; and the same with torch operations in their place.

python -m benchmarks.recurrent_speed --shape lfm2-350m

The models have random weights, quantized while loading. The ways take turns; products and attention run natively in all
of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.random_hybrid import SHAPES, config_of
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
    config = AutoConfig.for_model(**config_of(shape))
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
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}")] = "lfm2-350m",
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
