"""Define the measurements, which are the same for every engine. All texts are greedy and have a given length."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Final, TypeAlias

import numpy as np
from attrs import frozen

from benchmarks.process import EngineFailedError, EngineProcess
from benchmarks.prompts import PromptMaker
from benchmarks.protocol import RequestTimes, UnsupportedError

__all__ = [
    "LOAD",
    "ONE_STREAM",
    "QUICK",
    "SHARE",
    "Figures",
    "Metric",
    "Sizes",
    "Task",
    "decode_rate",
    "load_figures",
    "make_tasks",
    "warm_up",
]


@frozen
class Metric:
    """Names a figure.

    :ivar higher_is_better: False: lower is better
    """

    key: str
    title: str
    unit: str
    higher_is_better: bool = True


@frozen(kw_only=True)
class Sizes:
    """Sets lengths in tokens.

    :ivar streams: numbers of concurrent requests; each is a decode task
    :ivar prompt: prompt of the decode tasks
    :ivar output: output of the decode tasks
    :ivar prefix: prompt of the prefix cache task, which is sent twice
    :ivar question: tokens that follow the prefix the second time
    :ivar depth: the long prompt
    :ivar depth_output: tokens generated after the long prompt
    :ivar buffer: bytes that are read to measure the bandwidth
    """

    streams: tuple[int, ...] = (1, 4, 16)
    prompt: int = 32
    output: int = 128
    prefix: int = 1000
    question: int = 16
    depth: int = 4000
    depth_output: int = 48
    buffer: int = 3 << 29

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, rounded up to whole blocks of any usual size."""
        return -(-(self.depth + self.depth_output) // 256) * 256


QUICK: Final = Sizes(
    streams=(1, 4), prompt=8, output=24, prefix=96, question=8, depth=192, depth_output=24, buffer=1 << 24
)
"""Shows that everything runs; its figures mean nothing."""

LOAD: Final = Metric("load", "process start to first token", "s", higher_is_better=False)
"""Measured once per round, when the engine's process is started, with the file in the page cache."""

ONE_STREAM: Final = "decode_1"

SHARE: Final = Metric("bandwidth_share", "decode, 1 stream, of the read bandwidth", "%")
"""Bytes of weights read per token, times tokens per second, divided by the bandwidth measured in the same round."""

Figures: TypeAlias = Mapping[str, float]


@frozen
class Task:
    """Describes one measurement.

    :ivar metrics: the metrics that ``measure`` returns, by key
    :ivar measure: measures; called with the engine, the maker of prompts, and a key that is unique within the round
    """

    name: str
    metrics: tuple[Metric, ...]
    measure: Callable[[EngineProcess, PromptMaker, str], Figures]


def make_tasks(sizes: Sizes) -> list[Task]:
    """Return all tasks, in the order in which they run."""
    decodes = [_decode(sizes, streams) for streams in sizes.streams]
    return [*decodes, _prefix(sizes), _depth(sizes), _lag(sizes), _memory(sizes), _peak()]


def warm_up(engine: EngineProcess, prompts: PromptMaker, sizes: Sizes, key: str) -> None:
    """Warm an engine up: let it make what it makes on first use, such as kernels for shapes, pools and graphs.

    Failures are ignored; the tasks report them.
    """
    for streams in sizes.streams:
        with suppress(UnsupportedError, EngineFailedError):
            engine.generate([prompts.make(sizes.prompt, f"{key}.{streams}.{index}") for index in range(streams)], 4)
    with suppress(UnsupportedError, EngineFailedError):
        engine.generate([prompts.make(sizes.prefix // 2, key)], 1)


def load_figures(engine: EngineProcess, prompts: PromptMaker, sizes: Sizes, key: str) -> Figures:
    """Measure the time from the start of the engine's process, which has just loaded the model, to the first token of a
    short text.
    """
    engine.generate([prompts.make(sizes.prompt, key)], 1)
    return {LOAD.key: time.perf_counter() - engine.started}


def _decode(sizes: Sizes, streams: int) -> Task:
    rate = Metric(f"decode_{streams}", f"decode, {streams} stream{'s' if streams > 1 else ''}", "tok/s")
    total = Metric(f"requests_{streams}", f"{streams} short requests, prompts included", "tok/s")

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        batch = [prompts.make(sizes.prompt, f"{key}.{index}") for index in range(streams)]
        times = engine.generate(batch, sizes.output)
        num_tokens = sum(entry.num_tokens for entry in times)
        figures = {rate.key: decode_rate(times), total.key: num_tokens / max(entry.last for entry in times)}
        return {metric.key: figures[metric.key] for metric in metrics}

    metrics = (rate,) if streams == 1 else (rate, total)
    return Task(f"decode-{streams}", metrics, measure)


def _prefix(sizes: Sizes) -> Task:
    rate = Metric(f"prefill_{sizes.prefix}", f"prefill of {sizes.prefix:,} tokens", "tok/s")
    cold = Metric("first_token_cold", f"first token after {sizes.prefix:,} tokens, cold", "ms", higher_is_better=False)
    cached = Metric("first_token_cached", "first token, these tokens cached", "ms", higher_is_better=False)
    gain = Metric("prefix_gain", "cold / cached", "x")

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        prompt = prompts.make(sizes.prefix, key)
        (first,) = engine.generate([prompt], 1)
        (second,) = engine.generate([prompts.extend(prompt, sizes.question, f"{key} question")], 1)
        return {
            rate.key: first.num_prompt_tokens / first.first,
            cold.key: first.first * 1000,
            cached.key: second.first * 1000,
            gain.key: first.first / second.first,
        }

    return Task("prefix", (rate, cold, cached, gain), measure)


def _depth(sizes: Sizes) -> Task:
    rate = Metric(f"prefill_{sizes.depth}", f"prefill of {sizes.depth:,} tokens", "tok/s")
    deep = Metric("decode_deep", f"decode after {sizes.depth:,} tokens", "tok/s")
    kept = Metric("depth_kept", "of the speed at depth 0", "%")

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        def shallow(when: str) -> float:
            prompt = prompts.make(sizes.prompt, f"{key} shallow {when}")
            return decode_rate(engine.generate([prompt], sizes.depth_output))

        before = shallow("before")
        (times,) = engine.generate([prompts.make(sizes.depth, key)], sizes.depth_output)
        # The faster of two, since a disturbed reference would overstate the relative speed at depth.
        speed = max(before, shallow("after"))
        return {
            rate.key: times.num_prompt_tokens / times.first,
            deep.key: decode_rate([times]),
            kept.key: 100 * decode_rate([times]) / speed,
        }

    return Task("depth", (rate, deep, kept), measure)


def _lag(sizes: Sizes) -> Task:
    streams, interval = max(sizes.streams), 0.002
    half = Metric("lag_p50", f"event-loop lag beside {streams} streams, p50", "ms", higher_is_better=False)
    most = Metric("lag_p99", f"event-loop lag beside {streams} streams, p99", "ms", higher_is_better=False)

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        batch = [prompts.make(sizes.prompt, f"{key}.{index}") for index in range(streams)]
        lags = engine.event_loop_lag(batch, sizes.output, interval)
        return {metric.key: float(np.percentile(lags, q)) * 1000 for metric, q in ((half, 50), (most, 99))}

    return Task("lag", (half, most), measure)


def _memory(sizes: Sizes) -> Task:
    title = f"peak resident memory, one prompt of {sizes.depth:,} tokens"
    memory = Metric("memory", title, "MiB", higher_is_better=False)

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        # A fresh process: in the other one, this package's prefix cache holds all prompts of the round by now.
        with closing(engine.another()) as fresh:
            fresh.generate([prompts.make(sizes.depth, key)], sizes.depth_output)
            return {memory.key: fresh.peak_memory() / 2**20}

    return Task("memory", (memory,), measure)


def _peak() -> Task:
    title = "peak resident memory, all tasks, with what a prefix cache keeps"
    peak = Metric("peak_memory", title, "MiB", higher_is_better=False)

    def measure(engine: EngineProcess, prompts: PromptMaker, key: str) -> Figures:
        return {peak.key: engine.peak_memory() / 2**20}

    return Task("peak", (peak,), measure)


def decode_rate(times: Sequence[RequestTimes]) -> float:
    """Return tokens per second from the batch's first token to its last. Each request's first token is not counted,
    since prefill computes it.
    """
    num_tokens = sum(entry.num_tokens - 1 for entry in times)
    return num_tokens / (max(entry.last for entry in times) - min(entry.first for entry in times))
