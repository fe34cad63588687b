"""Measure where the time of a decode step goes.

python -m benchmarks.step_profile --model smollm2 --streams 16

Methods are wrapped to record when they begin and end, which adds about a microsecond per call.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Annotated, Any, Final
from unittest.mock import patch

import torch
import typer
from attrs import evolve
from rich.console import Console
from rich.table import Table

from benchmarks.inside import OpenEngine, open_engine
from benchmarks.models import model_path
from benchmarks.prompts import PromptMaker
from paged_sdk import Model, SamplingParams, TextModelBuilder
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.engine.engine import Engine
from paged_sdk.engine.output import OutputProcessor
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_head import FusedHead
from paged_sdk.quant import linear
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.linear import Linear
from paged_sdk.runner import step_runner
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.host_rows import HostRows
from paged_sdk.runner.mixed_graphs import MixedGraphs
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.system.processors import usable_processors
from paged_sdk.worker.output_loops import OutputLoops
from paged_sdk.worker.worker import Worker

__all__ = ["WAITING", "Stopwatch", "profile_steps"]

WAITING: Final = "waiting for the device"
"""The part of a step in which Python waits. If no step is submitted ahead, other parts wait for the device too."""

_STEP: Final = "engine, the rest"


def _parts(engine: OpenEngine) -> Iterator[tuple[type[Any] | ModuleType, str, str]]:
    """Return each function's class or module, its name, and the part of a step that its own time belongs to."""
    yield Worker, "_take_commands", "worker: mailbox"
    yield OutputLoops, "publish", "worker: publish"
    yield Engine, "step", _STEP
    yield Engine, "stats", "worker: stats"
    yield Scheduler, "schedule", "schedule"
    yield Scheduler, "update", "update"
    yield ModelRunner, "submit", "runner, the rest"
    yield SampledStep, "result", WAITING
    yield DecodeGraphs, "forward", "recorded step: input and launch"
    yield MixedGraphs, "forward", "recorded step with prompts: input and launch"
    yield DeviceSampler, "sample", "sampler: launches"
    yield step_runner, "make_input_batch", "input batch"
    for model in {DecoderModel, engine.model_class}:
        yield model, "forward", f"{model.__name__}, the rest"
        yield model, "logits", "logits, the rest"
    for backend in _subclasses(AttentionBackend, "prepare"):
        yield backend, "prepare", "attention: prepare"
    for method in ("write", "attend", "forward"):
        for step in _subclasses(AttentionStep, method):
            yield step, method, "attention"
    for step in _subclasses(AttentionStep, "rotate_and_forward"):
        yield step, "rotate_and_forward", "attention, rotary embedding included"
    for method in ("forward", "forward_gated"):
        for kind in _subclasses(Linear, method):
            yield kind, method, f"linears: {kind.__name__}"
    for method in ("logits", "likeliest"):
        yield FusedHead, method, "linears: FusedHead, with the last norm"
    for kind in _subclasses(Experts, "forward"):
        yield kind, "forward", f"experts: {kind.__name__}"
    yield Rotation, "rotate_", "rotary embedding"
    for method in ("forward", "add_and_forward"):
        yield RMSNorm, method, "norms"
    for name in ("gated_activation", "gated_activation_reference"):
        yield linear, name, "activation"
    yield Sampler, "sample", "sampler"
    yield HostRows, "take", "sampler"
    yield OutputProcessor, "process", "detokenize, stop strings, events"


def _subclasses(base: type[Any], method: str) -> Iterator[type[Any]]:
    """Return the subclasses that define a method of this name."""
    for kind in base.__subclasses__():
        if method in vars(kind):
            yield kind
        yield from _subclasses(kind, method)


class Stopwatch:
    """Measures the worker thread's time by part; nested time counts only for the innermost part.

    :ivar seconds: time by part, while ``running``
    :ivar calls: number of calls of :data:`_STEP`, while ``running``
    """

    def __init__(self) -> None:
        self.running = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def watching(self, engine: OpenEngine) -> Iterator[None]:
        """Wrap the functions of :func:`_parts` within this context."""
        with ExitStack() as stack:
            for place, name, part in _parts(engine):
                stack.enter_context(patch.object(place, name, self._timed(getattr(place, name), part)))
            yield

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(push=part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(push=None)
                self.steps += self.running and part == _STEP

        return timed

    def _switch(self, push: str | None) -> None:
        now = time.perf_counter()
        if self._stack and self.running:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now
        if push is None:
            self._stack.pop()
        else:
            self._stack.append(push)


async def profile_steps(model: Model, stopwatch: Stopwatch, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Run the prompts, and measure while all of them decode."""
    sampling = evolve(SamplingParams.deterministic(), max_len=max_tokens, ignore_eos=True)
    num_prefilling = len(prompts)

    async def read(prompt: Sequence[int]) -> None:
        nonlocal num_prefilling
        is_first = True
        async for _ in model.stream_completion_request(prompt, sampling):
            if is_first:
                is_first = False
                num_prefilling -= 1
                stopwatch.running = num_prefilling == 0
        stopwatch.running = False

    await asyncio.gather(*map(read, prompts))


def _as_table(stopwatch: Stopwatch, title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "us per step", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    total = sum(stopwatch.seconds.values())
    for part, seconds in sorted(stopwatch.seconds.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{seconds / stopwatch.steps * 1e6:,.0f}", f"{seconds / total:.1%}")
    table.add_section()
    table.add_row("step", f"{total / stopwatch.steps * 1e6:,.0f}", "")
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    streams: Annotated[int, typer.Option(min=1)] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt")] = 128,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens generated by each stream")] = 128,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Measure the time per part of one step of N streams."""
    path, num_threads = model_path(model), threads or usable_processors()
    torch.set_num_threads(num_threads)
    stopwatch = Stopwatch()
    engine = open_engine(TextModelBuilder(path).with_num_threads(num_threads).with_max_num_seqs(streams))
    prompts = PromptMaker(engine.parts.text.tokenizer)
    batch = [prompts.make(prompt, f"Stream {index}").token_ids for index in range(streams)]

    async def run() -> None:
        async with engine.start() as started:
            await profile_steps(started, stopwatch, batch, tokens)

    with stopwatch.watching(engine):
        asyncio.run(run())
    title = f"{path.name}: {streams} streams, {num_threads} threads, mean of {stopwatch.steps} steps"
    Console().print(_as_table(stopwatch, title))


if __name__ == "__main__":
    typer.run(main)
