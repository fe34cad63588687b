"""Send thousands of requests and end them in every way there is, in every mode of KV; then look for what is left.

    python tests/soak.py --requests 10000 --seed 1

Every text that is read, whole or in part, must be the one that the request has when nobody disturbs it. At the end no
block, thread, file, task or entry in the engine's books may be left, and the memory of the process must not grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
from attrs import Factory, define, frozen

import tiny
from paged_sdk import (
    BlockingModel,
    CompletionResponse,
    MemoryGpuConfig,
    Model,
    ModelClosedError,
    PagedAttentionMeta,
    PagedCacheType,
    QueueFullError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)

__all__ = ["MODES", "Report", "expect_no_more", "expect_rest", "soak"]

BLOCK_SIZE: Final = 8
NUM_READERS: Final = 24
"""So many requests are under way at once; models take 8, so that two of three wait in the queue."""


def _pool(num_blocks: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    tokens = MemoryGpuConfig.ContextSize(num_blocks * BLOCK_SIZE)
    return PagedAttentionMeta(block_size=BLOCK_SIZE, gpu_memory=tokens, cache_type=cache_type)


_MANY: Final = 500
"""Of fewer requests it depends on the machine which of them meet in a step."""

MODES: Final[Mapping[str, Callable[[TextModelBuilder], TextModelBuilder]]] = {
    "paged": lambda builder: builder.with_paged_attn(_pool(128)),
    "paged, fp8": lambda builder: builder.with_paged_attn(_pool(128, PagedCacheType.F8E4M3)),
    "no prefix cache": lambda builder: builder.with_paged_attn(_pool(128)).with_prefix_cache_n(0),
    "contiguous": lambda builder: builder.without_paged_attn(),
    "tiny pool": lambda builder: builder.with_paged_attn(_pool(15)),
}


@frozen
class Task:
    """Holds a request and the texts that it has when nothing disturbs it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    texts: tuple[str, ...] = ()


@define
class Report:
    """Counts what happened.

    :ivar ends: how often requests ended in each way
    :ivar complaints: what was wrong
    """

    mode: str
    ends: Counter[str] = Factory(Counter)
    complaints: list[str] = Factory(list)
    num_preemptions: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    grown_bytes: int = 0

    def expect(self, good: bool, complaint: object) -> None:
        if not good:
            self.complaints.append(f"{self.mode}: {complaint}")


def make_tasks(rng: random.Random) -> list[Task]:
    """Make requests of every kind, some of which share their prefixes."""
    shared = tuple(rng.randrange(3, tiny.VOCAB_SIZE) for _ in range(40))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "n_choices": 2, "repetition_penalty": 1.1},
        {"temperature": 0.0, "stop": ("zz", "qu"), "frequency_penalty": 0.5},
    ]
    tasks = []
    for index in range(16):
        own = tuple(rng.randrange(3, tiny.VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))
        sampling = SamplingParams(
            seed=index, max_len=rng.randrange(2, 40), ignore_eos=True, **kinds[index % len(kinds)]
        )
        tasks.append(Task((*shared[: rng.choice((0, 16, 40))], *own), sampling))
    return tasks


class Reader:
    """Sends one request after the other, and ends each in some way.

    :param report: gets what happened
    """

    def __init__(self, model: Model, tasks: Sequence[Task], rng: random.Random, report: Report) -> None:
        self._model = model
        self._tasks = tasks
        self._rng = rng
        self._report = report
        self._ways: list[tuple[str, Callable[[Task], Awaitable[None]]]] = [
            ("read whole", self.read_whole),
            ("read by chunk", self.read_by_chunk),
            ("stream closed", self.close_stream),
            ("stream dropped", self.drop_stream),
            ("task cancelled", self.cancel),
            ("cancelled in the queue", self.cancel_at_once),
            ("timed out", self.time_out),
            ("left by an exception", self.leave_by_exception),
        ]

    async def run(self, num_requests: int) -> None:
        for _ in range(num_requests):
            name, way = self._rng.choice(self._ways)
            self._report.ends[name] += 1
            try:
                await way(self._rng.choice(self._tasks))
            except QueueFullError:
                self._report.ends["refused: queue full"] += 1

    async def read_whole(self, task: Task) -> None:
        self.check(task, await self._model.send_completion_request(task.prompt, task.sampling), whole=True)

    async def read_by_chunk(self, task: Task) -> None:
        await self._read(task, num_chunks=10**9)

    async def close_stream(self, task: Task) -> None:
        await self._read(task, num_chunks=self._rng.randrange(8))

    async def drop_stream(self, task: Task) -> None:
        stream = self._model.stream_completion_request(task.prompt, task.sampling)
        for _ in range(self._rng.randrange(1, 6)):
            async for _ in stream:
                break

    async def cancel(self, task: Task) -> None:
        with anyio.move_on_after(self._rng.random() * 0.03):
            await self.read_whole(task)

    async def cancel_at_once(self, task: Task) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.read_whole, task)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    async def time_out(self, task: Task) -> None:
        timeout = 0.001 + self._rng.random() * 0.02
        try:
            response = await self._model.send_completion_request(task.prompt, task.sampling, timeout=timeout)
        except RequestTimeoutError as error:
            if isinstance(error.partial_response, CompletionResponse):
                self.check(task, error.partial_response, whole=False)
        else:
            self.check(task, response, whole=True)

    async def leave_by_exception(self, task: Task) -> None:
        try:
            async with self._model.stream_completion_request(task.prompt, task.sampling) as stream:
                async for _ in stream:
                    raise KeyError("an application's own")
        except KeyError:
            pass

    def check(self, task: Task, response: CompletionResponse, *, whole: bool) -> None:
        texts = [choice.text for choice in response.choices]
        good = tuple(texts) == task.texts if whole else all(map(_is_beginning, texts, task.texts))
        self._report.expect(good, f"{task} has become {texts}")
        usage = response.usage
        self._report.expect(usage.prompt_tokens in (0, len(task.prompt)), f"usage {usage} of {len(task.prompt)} tokens")
        self._report.expect(not whole or usage.completion_tokens > 0, usage)

    async def _read(self, task: Task, *, num_chunks: int) -> None:
        """Read at most so many chunks, and check their order."""
        texts = [""] * len(task.texts)
        ended: set[int] = set()
        usage: object = None
        async with self._model.stream_completion_request(task.prompt, task.sampling) as stream:
            if num_chunks:
                async for chunk in stream:
                    self._report.expect(usage is None, "a chunk after the usage")
                    for choice in chunk.choices:
                        self._report.expect(choice.index not in ended, f"choice {choice.index} goes on after its end")
                        texts[choice.index] += choice.text
                        if choice.finish_reason is not None:
                            ended.add(choice.index)
                    usage = chunk.usage
                    num_chunks -= 1
                    if not num_chunks:
                        break
        if usage is not None:
            self._report.expect(len(ended) == len(texts), "usage before the end of all choices")
            self._report.expect(tuple(texts) == task.texts, f"{task} has become {texts}")
        else:
            self._report.expect(all(map(_is_beginning, texts, task.texts)), f"{task} has become {texts}")
        self.check(task, stream.response_so_far(), whole=usage is not None)


def _is_beginning(text: str, whole: str) -> bool:
    # A text that ends within a character shows a replacement for it.
    return whole.startswith(text.rstrip("\ufffd"))


async def run_mode(
    builder: TextModelBuilder, tasks: Sequence[Task], num_requests: int, seed: int, report: Report
) -> list[Task]:
    """Send the requests of one mode to one model, and close it while requests are under way.

    :returns: the tasks with their texts
    """
    async with builder.build() as model:
        undisturbed = []
        for task in tasks:
            response = await model.send_completion_request(task.prompt, task.sampling)
            undisturbed.append(Task(task.prompt, task.sampling, tuple(choice.text for choice in response.choices)))
        num_each = -(-num_requests // NUM_READERS)
        async with anyio.create_task_group() as readers:
            for index in range(NUM_READERS):
                reader = Reader(model, undisturbed, random.Random(seed * 1000 + index), report)
                readers.start_soon(reader.run, num_each)
        gc.collect()  # streams that were dropped
        await expect_rest(model, report)
        stats = model.stats()
        report.num_preemptions, report.num_steps = stats.preemptions, stats.steps
        if report.mode == "tiny pool" and num_requests >= _MANY:
            report.expect(stats.preemptions > 0, "no request lost its KV to another")
        await _close_under_way(model, undisturbed, report)
    report.expect(model.stats().blocks_used == 0, model.stats())
    return undisturbed


async def expect_rest(model: Model, report: Report) -> None:
    """Check that the engine has nothing left of any request."""
    worker: Any = model._worker
    with anyio.move_on_after(20):
        while worker._engine.has_work or worker._loops or model.stats().blocks_used:
            await anyio.sleep(0.002)
    stats = model.stats()
    report.expect((stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0), stats)
    report.expect(stats.blocks_cached + stats.blocks_free == stats.blocks_total, stats)
    report.expect(not worker._loops, "event loops are still listened for")
    output = worker._engine._output
    report.expect(not output._requests and not output._choices, "requests in the output's books")
    report.expect(len(worker._engine._runner._step_runner.sampler._states) <= NUM_READERS * 2, "states of the sampler")


async def _close_under_way(model: Model, tasks: Sequence[Task], report: Report) -> None:
    """Close the model while requests run and wait: each gets an answer, with a beginning of its text."""

    async def send(task: Task) -> None:
        try:
            response = await model.send_completion_request(task.prompt, task.sampling)
        except ModelClosedError:  # it was not submitted yet
            report.ends["refused: model closed"] += 1
        else:
            Reader(model, tasks, random.Random(0), report).check(task, response, whole=False)
            report.ends["model closed"] += 1

    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as senders:
            for task in tasks:
                senders.start_soon(send, task)
            while not model.stats().running:
                await anyio.sleep(0.001)
            await model.aclose()
    report.expect(not scope.cancelled_caught, "a request under way got no answer when the model was closed")


def run_blocking(
    builder: TextModelBuilder, tasks: Sequence[Task], num_requests: int, seed: int, report: Report
) -> None:
    """Read streams from several threads, and leave some of them.

    :param tasks: with their texts
    """
    with BlockingModel(builder.build()) as model:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(-(-num_requests // 4)):
                task = rng.choice(tasks)
                with model.stream_completion_request(task.prompt, task.sampling) as stream:
                    for _ in range(rng.choice((0, 1, 3, 10**9))):
                        if next(stream, None) is None:
                            break
                parts = [choice.text for choice in stream.response_so_far().choices]
                report.expect(all(map(_is_beginning, parts, task.texts)), f"{parts} of {task.texts}")
                report.ends["blocking stream left"] += 1

        threads = [threading.Thread(target=read, args=(seed * 100 + index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        give_up = time.monotonic() + 20
        while model.stats().blocks_used and time.monotonic() < give_up:
            time.sleep(0.002)
        report.expect(model.stats().blocks_used == 0, model.stats())


def soak(directory: Path, num_requests: int, seed: int, modes: Sequence[str] = tuple(MODES)) -> list[Report]:
    """Send about ``num_requests`` requests in all, and report on each mode.

    :param directory: where the tiny checkpoint is, or is written to
    """
    if not (directory / "config.json").is_file():
        tiny.make_checkpoint("llama", directory)
    plain = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    reports = []
    for index, mode in enumerate(modes):
        builder = MODES[mode](plain.with_max_num_seqs(8).with_max_queue(2 * NUM_READERS))
        tasks = make_tasks(random.Random(seed + index))
        report = Report(mode)
        num_here = num_requests // len(modes)
        run = partial(run_mode, builder, tasks)
        backend = ("asyncio", "trio")[index % 2]
        if num_here >= 1000:
            anyio.run(run, num_here // 20, seed, Report(mode), backend=backend)  # allocators and caches fill up
        gc.collect()
        threads, files, memory, start = threading.active_count(), _num_files(), _resident_bytes(), time.monotonic()
        with_texts = anyio.run(run, num_here * 9 // 10, seed, report, backend=backend)
        run_blocking(builder, with_texts, num_here // 10, seed, report)
        gc.collect()
        report.seconds = time.monotonic() - start
        expect_no_more("threads", threads, threading.active_count, report)
        expect_no_more("files", files, _num_files, report)
        report.grown_bytes = _resident_bytes() - memory
        report.expect(report.grown_bytes < 100 << 20, f"memory has grown by {report.grown_bytes >> 20} MiB")
        reports.append(report)
    return reports


def expect_no_more(what: str, before: int, count: Callable[[], int], report: Report) -> None:
    """Event loops' own helper threads end a moment after their loop."""
    give_up = time.monotonic() + 15
    while count() > before and time.monotonic() < give_up:
        time.sleep(0.01)
    report.expect(count() <= before, f"{count()} {what}, {before} before")


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", action="append", choices=tuple(MODES), help="all five if it is not given")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as directory:
        reports = soak(Path(directory), arguments.requests, arguments.seed, arguments.mode or tuple(MODES))
    for report in reports:
        num = sum(report.ends.values())
        print(
            f"{report.mode}: {num} requests in {report.seconds:.1f} s, {report.num_steps} steps, "
            f"{report.num_preemptions} preemptions, {report.grown_bytes / 2**20:+.1f} MiB"
        )
        print("  " + ", ".join(f"{way} {count}" for way, count in sorted(report.ends.items())))
        for complaint in report.complaints[:20]:
            print("  WRONG:", complaint[:500])
    return 1 if any(report.complaints for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
