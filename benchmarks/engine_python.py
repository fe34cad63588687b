"""Measure the engine's Python overhead: the cost of a decode step with a runner that only waits.

python -m benchmarks.engine_python --streams 16 --streams 64 --streams 256

Everything between a request and its reader is the same as in an application, except for the runner: it waits as long as
a device would compute, and returns random tokens. Figures are CPU time, of the worker thread by part of a step, and of
the event loop's thread. Waiting, for the GIL too, is only part of the wall time. Measuring adds about a microsecond to
each part's figure.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from paged_sdk import Model, SamplingParams, embedded_model_path
from paged_sdk.build.parts import ModelParts
from paged_sdk.chat.text_processor import TextProcessor, text_processor_from_gguf
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.engine.engine import Engine
from paged_sdk.engine.output import OutputProcessor
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.model import CompletionStream
from paged_sdk.runner.output import FinishedStep, RunnerOutput
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.worker.output_loops import OutputLoops
from paged_sdk.worker.worker import Worker

__all__ = ["PARTS", "RandomTokens", "StepClock", "measure"]

_PROMPT_TOKENS: Final = 16
_WARM_UP_STEPS: Final = 20

_REST: Final = "worker, the rest"
_GARBAGE: Final = "garbage collection"
PARTS: Final = ("schedule", "runner", "update", "output", "publish", "stats", "engine, the rest", _REST)
"""The parts of a step on the worker thread, without garbage collection, which not every step has."""
_ON_LOOP: Final = "event loop: delivery"
_WALL: Final = "wall"


class RandomTokens:
    """Stands in for a runner: waits as long as a device would, and then draws random tokens.

    :param token_ids: the tokens to draw from
    :param seconds: duration of a step
    """

    def __init__(self, token_ids: Sequence[int], seconds: float) -> None:
        self._token_ids = token_ids
        self._seconds = seconds
        self._random = random.Random(0)

    def submit(self, output: SchedulerOutput) -> FinishedStep:
        if self._seconds:
            time.sleep(self._seconds)
        rows = output.scheduled
        drawn = self._random.choices(self._token_ids, k=len(rows))
        tokens = [[token] * row.num_samples for row, token in zip(rows, drawn, strict=True)]
        return FinishedStep(RunnerOutput(tokens, [None] * len(rows)))

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


class StepClock:
    """Measures CPU time by part of a step; nested time counts only for the innermost part.

    Only steps that decode one token of every stream are counted, after a warm-up.

    :param num_steps: number of steps to count
    :ivar nanoseconds: time of all counted steps, by part
    :ivar steps: number of steps counted so far
    """

    def __init__(self, num_streams: int, num_steps: int) -> None:
        self._num_streams = num_streams
        self._num_steps = num_steps
        self._loop_thread = threading.get_ident()
        self._loop_clock = time.pthread_getcpuclockid(self._loop_thread)
        self.nanoseconds: defaultdict[str, int] = defaultdict(int)
        self.steps = 0
        self._num_decodes = 0
        self._running = False
        self._stack: list[str] = []
        self._since = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of every engine within this context, which must be entered on the event loop's thread."""
        parts: list[tuple[type[Any], str, str]] = [
            (Worker, "_take_commands", _REST),
            (OutputLoops, "publish", "publish"),
            (Engine, "step", "engine, the rest"),
            (Engine, "stats", "stats"),
            (Scheduler, "schedule", "schedule"),
            (Scheduler, "update", "update"),
            (RandomTokens, "submit", "runner"),
            (OutputProcessor, "process", "output"),
        ]
        with ExitStack() as stack:
            for owner, name, part in parts:
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), part)))
            stack.enter_context(patch.object(Scheduler, "schedule", self._watched(Scheduler.schedule)))
            gc.callbacks.append(self._collecting)
            stack.callback(gc.callbacks.remove, self._collecting)
            yield

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        # A garbage collection runs in whichever part reaches the threshold, so it is counted separately.
        if threading.get_ident() != self._loop_thread:
            self._switch(push=_GARBAGE if phase == "start" else None)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(push=part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(push=None)

        return timed

    def _watched(self, schedule: Callable[[Scheduler], SchedulerOutput]) -> Callable[[Scheduler], SchedulerOutput]:
        def watched(scheduler: Scheduler) -> SchedulerOutput:
            output = schedule(scheduler)
            rows = output.scheduled
            if len(rows) == self._num_streams and all(row.num_new_tokens == 1 for row in rows):
                self._num_decodes += 1
                self._begin_or_end(self._num_decodes - _WARM_UP_STEPS)
            return output

        return watched

    def _begin_or_end(self, step: int) -> None:
        """Start the clock at the first counted step, and stop it after the last.

        :param step: number of the step that begins now, among the counted ones
        """
        if step not in (0, self._num_steps):
            return
        sign = 1 if step else -1
        self._running = not step
        self.steps = step
        self.nanoseconds[_ON_LOOP] += sign * time.clock_gettime_ns(self._loop_clock)
        self.nanoseconds[_WALL] += sign * time.monotonic_ns()

    def _switch(self, push: str | None) -> None:
        now = time.thread_time_ns()
        if self._running:
            self.nanoseconds[self._stack[-1] if self._stack else _REST] += now - self._since
        self._since = now
        if push is None:
            self._stack.pop()
        else:
            self._stack.append(push)


def _parts(
    text: TextProcessor, runner: RandomTokens, num_streams: int, num_tokens: int, on_worker_start: Callable[[], None]
) -> ModelParts:
    """Make the parts of a model with capacity for all streams."""
    max_model_len = _PROMPT_TOKENS + num_tokens
    config = EngineConfig(
        num_blocks=num_streams * (max_model_len // 32 + 1),
        max_num_seqs=num_streams,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
    )
    kv = KvCacheManager(config.num_blocks, config.block_size, prefix_caching=True, sliding_window=None)
    return ModelParts(
        name="random",
        model_type="random",
        architecture="random",
        engine=Engine(Scheduler(config, kv), kv, runner, text.tokenizer),
        text=text,
        config=config,
        vocab_size=text.tokenizer.vocab_size,
        hidden_size=1,
        max_sequence_tokens=_PROMPT_TOKENS,
        on_worker_start=on_worker_start,
    )


def _text_tokens(tokenizer: Tokenizer) -> list[int]:
    def is_text(token_id: int) -> bool:
        return bool(tokenizer.token_bytes(token_id).decode(errors="ignore")) and not tokenizer.is_special(token_id)

    return list(filter(is_text, range(tokenizer.vocab_size)))


async def measure(text: TextProcessor, *, num_streams: int, num_steps: int, seconds: float) -> StepClock:
    """Read ``num_streams`` concurrent streams, chunk by chunk.

    :param seconds: the runner's duration of a step
    :returns: the clock, with ``num_steps`` steps counted
    """
    # More steps for prefill, for the warm-up, and because streams do not all begin in the same step.
    num_tokens = num_steps + 3 * _WARM_UP_STEPS
    sampling = SamplingParams(temperature=0, max_len=num_tokens, ignore_eos=True)
    runner = RandomTokens(_text_tokens(text.tokenizer), seconds)
    clock = StepClock(num_streams, num_steps)
    all_submitted = threading.Event()

    def wait_for_requests() -> None:
        all_submitted.wait()

    parts = _parts(text, runner, num_streams, num_tokens, wait_for_requests)

    async def read(stream: CompletionStream) -> None:
        async for chunk in stream:
            assert chunk.choices

    with clock.watching():
        async with Model(parts) as model, AsyncExitStack() as stack:
            prompts = ([100 + index, *range(200, 199 + _PROMPT_TOKENS)] for index in range(num_streams))
            streams = [model.stream_completion_request(prompt, sampling) for prompt in prompts]
            for stream in streams:
                await stack.enter_async_context(stream)
            all_submitted.set()
            await asyncio.gather(*map(read, streams))
    assert clock.steps == num_steps, f"{clock.steps} of {num_steps} steps were counted"
    return clock


def main(
    streams: Annotated[list[int], typer.Option(min=1)] = [16, 64, 256],  # noqa: B006 (typer copies it)
    steps: Annotated[int, typer.Option(min=1)] = 200,
    device_ms: Annotated[float, typer.Option(min=0, help="What a step of the device takes; 0: no wait at all")] = 5.0,
) -> None:
    """Measure the microseconds of Python per decode step, by part and number of streams."""
    metadata = open_checkpoint(embedded_model_path()).metadata
    assert metadata is not None
    text = text_processor_from_gguf(metadata)
    clocks = [asyncio.run(measure(text, num_streams=n, num_steps=steps, seconds=device_ms / 1e3)) for n in streams]
    table = Table(title=f"us per decode step, mean of {steps}; the device takes {device_ms:g} ms")
    table.add_column("")
    for n in streams:
        table.add_column(f"{n} streams", justify="right")

    def add_row(name: str, *parts: str, less: float = 0.0) -> None:
        us = [sum(clock.nanoseconds[part] for part in parts) / steps / 1e3 - less for clock in clocks]
        table.add_row(name, *(f"{value:,.0f}" for value in us))

    for part in (*PARTS, _GARBAGE):
        add_row(part, part)
    table.add_section()
    add_row("worker, all", *PARTS, _GARBAGE)
    add_row(_ON_LOOP, _ON_LOOP)
    add_row("wall, less the device", _WALL, less=device_ms * 1e3)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
