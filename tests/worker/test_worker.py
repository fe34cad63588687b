"""The worker thread: crash semantics, event loops that end, forks, commands after the end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import trio
from torch import Tensor

from arrivals import wait_for_requests
from caught_errors import KnownError, goes_when_caught
from paged_sdk import (
    EngineDeadError,
    GgufModelBuilder,
    Model,
    ModelClosedError,
    NumericalError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.output import PendingStep
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.system.event_loop import EventLoop
from paged_sdk.testing import fake_model
from paged_sdk.worker.worker import Worker
from talk import said, until

LONG = SamplingParams(temperature=0, max_len=2000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_len=10, ignore_eos=True)


def fail_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Have the runner raise in the step after that many."""
    submit = ModelRunner.submit
    count = 0

    def failing(self: ModelRunner, output: SchedulerOutput) -> PendingStep:
        nonlocal count
        count += 1
        if count > steps:
            raise MemoryError("out of something")
        return submit(self, output)

    monkeypatch.setattr(ModelRunner, "submit", failing)


@pytest.mark.anyio
async def test_a_crash_reaches_every_live_and_later_request(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[EngineDeadError] = []

    async def send() -> None:
        with pytest.raises(EngineDeadError) as caught:
            await model.send_completion_request([1, 2, 3], LONG)
        errors.append(caught.value)

    async with builder.build() as model:
        fail_after(monkeypatch, 3)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(send)
        await send()
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error.__cause__, MemoryError)
        assert "out of something" in str(error)


class Remains:
    """Notes, whenever torch is asked to give the device's memory back, how much of the models built so far is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[int] = []
        self._parts: list[weakref.ref[Any]] = []
        init = ModelRunner.__init__

        def watched(runner: ModelRunner, model: Any, backend: Any, sampler: Any, *args: Any, **kwargs: Any) -> None:
            self._parts += map(weakref.ref, (model, backend, sampler))
            init(runner, model, backend, sampler, *args, **kwargs)

        def empty_cache() -> None:
            self.left.append(sum(part() is not None for part in self._parts))

        monkeypatch.setattr(ModelRunner, "__init__", watched)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)


def test_models_that_are_closed_leave_nothing_behind(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cycle() -> Model:
        async with builder.build() as model:
            await model.send_completion_request([1, 2, 3], SHORT)
        return model

    remains = Remains(monkeypatch)
    models = [asyncio.run(cycle()) for _ in range(5)]
    assert all(model.stats().running == 0 for model in models)  # which the application still has
    assert remains.left == [0] * 5


def test_an_engine_that_has_died_leaves_nothing_behind(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its death was raised from: the error lives on in the application."""

    def refuse(model: DecoderModel) -> Tensor:
        raise ValueError(f"{len(model.layers)} layers")

    def forward(self: DecoderModel, *args: Any) -> Tensor:
        try:
            return refuse(self)
        except ValueError as error:
            del self, args  # so that only the frame of the cause has the model
            raise LookupError("second") from error

    async def run() -> None:
        async with builder.without_paged_attn().build() as model:
            await model.send_completion_request([1, 2, 3], SHORT)

    remains = Remains(monkeypatch)
    monkeypatch.setattr(DecoderModel, "forward", forward)
    with pytest.raises(EngineDeadError) as caught:
        asyncio.run(run())
    assert isinstance(caught.value.__cause__, LookupError)
    assert remains.left == [0]


@pytest.mark.anyio
async def test_nan_logits_end_one_request_only(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_sdk.models.decoder import DecoderModel
    from paged_sdk.models.fused_decoder import FusedDecoderModel

    spoil = False

    def spoiled(compute: Callable[..., Any]) -> Callable[..., Any]:
        def with_nan(self: Any, hidden: Any, adapted: Any = None) -> Any:
            if spoil and len(hidden) == 2:
                hidden = hidden.clone()
                hidden[0, 3] = float("nan")
            return compute(self, hidden, adapted)

        return with_nan

    outcomes: dict[str, object] = {}

    async def send(name: str, prompt: list[int]) -> None:
        try:
            outcomes[name] = (await model.send_completion_request(prompt, SHORT)).choices
        except NumericalError as error:
            outcomes[name] = error

    monkeypatch.setattr(DecoderModel, "logits", spoiled(DecoderModel.logits))
    monkeypatch.setattr(FusedDecoderModel, "likeliest", spoiled(FusedDecoderModel.likeliest))
    async with builder.build() as model:
        alone = (await model.send_completion_request([4, 5, 6], SHORT)).choices
        spoil = True
        wait_for_requests(model, 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, "first", [1, 2, 3])
            tasks.start_soon(send, "second", [4, 5, 6])
        stats = model.stats()
    results = list(outcomes.values())
    failed = [result for result in results if isinstance(result, NumericalError)]
    assert len(failed) == 1
    assert failed[0].request_id
    assert alone in results or outcomes["first"] is not failed[0]
    assert stats.blocks_used == 0


def test_one_model_serves_many_loops_and_threads(builder: TextModelBuilder) -> None:
    async def build() -> Model:
        return await builder.build()

    async def ask(model: Model) -> str:
        return (await model.send_completion_request([1, 2, 3], SHORT)).choices[0].text

    model = asyncio.run(build())
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(asyncio.run(ask(model)))) for _ in range(4)] + [
        threading.Thread(target=lambda: texts.append(trio.run(ask, model))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert len(set(texts)) == 1
    asyncio.run(model.aclose())


def test_a_loop_that_ends_leaves_nothing_behind(builder: TextModelBuilder) -> None:
    async def build() -> Model:
        return await builder.build()

    async def leave_a_request(model: Model) -> object:
        stream = model.stream_completion_request([1, 2, 3], LONG)
        await stream.__anext__()
        return stream

    async def settle(model: Model) -> None:
        with anyio.fail_after(60):
            while model.stats().running:
                await anyio.sleep(0.001)

    model = asyncio.run(build())
    kept = asyncio.run(leave_a_request(model))
    # The stream is still held, but nobody can read it any more.
    asyncio.run(settle(model))
    assert model.stats().blocks_used == 0
    kept = trio.run(leave_a_request, model)
    asyncio.run(settle(model))
    assert model.stats().blocks_used == 0
    del kept
    asyncio.run(model.aclose())


def test_event_loop_handles_of_one_loop_are_equal() -> None:
    async def pair() -> tuple[EventLoop, EventLoop]:
        return EventLoop(), EventLoop()

    for first, second in (asyncio.run(pair()), trio.run(pair)):
        assert first == second
        assert hash(first) == hash(second)
        assert not first.call_soon(lambda: None)
        assert first != object()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_a_clear_error(builder: TextModelBuilder) -> None:
    async def build() -> Model:
        return await builder.build()

    async def ask(model: Model) -> int:
        try:
            await model.send_completion_request([1, 2, 3], SHORT)
        except ModelClosedError as error:
            return 17 if "fork" in str(error) else 1
        return 2

    model = asyncio.run(build())
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = asyncio.run(ask(model))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
    asyncio.run(model.aclose())


def test_a_dropped_model_ends_its_thread(builder: TextModelBuilder) -> None:
    async def build() -> Model:
        return await builder.build()

    model = asyncio.run(build())
    assert any(thread.name == "paged-sdk-worker" for thread in threading.enumerate())
    del model
    gc.collect()
    deadline = time.monotonic() + 60
    while any(thread.name == "paged-sdk-worker" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("num_cycles", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_open_close_cycles_leak_no_thread(builder: TextModelBuilder, num_cycles: int) -> None:
    async def cycle() -> None:
        async with builder.with_max_num_seqs(1).build():
            pass

    async def many(n: int) -> None:
        for _ in range(n):
            await cycle()

    of_others = set(threading.enumerate())  # helpers of earlier tests' event loops wait ten seconds for more to do
    asyncio.run(many(5))
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(many(num_cycles))
    gc.collect()
    deadline = time.monotonic() + 60
    while any(each.name.startswith("paged-sdk") for each in {*threading.enumerate()} - of_others):  # the last ends soon
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # The event loops' own helper threads come and go by a few; a leak would be one for each cycle.
    assert threading.active_count() < threads + 20
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


def test_a_model_per_loop(builder: TextModelBuilder) -> None:
    async def ask() -> str:
        async with builder.build() as model:
            return (await model.send_completion_request([1, 2, 3], SHORT)).choices[0].text

    assert asyncio.run(ask()) == asyncio.run(ask()) == trio.run(ask) == anyio.run(ask)


def test_gguf_and_safetensors_builders_agree_on_locations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a path or a hub id"):
        GgufModelBuilder("")
    with pytest.raises(ValueError, match="a path or a hub id"):
        TextModelBuilder(3)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_whoever_looks_sees_which_step_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_model("Yes.") as model:
        worker = model._insides.worker
        assert isinstance(worker, Worker)
        step, seen = worker._engine.step, list[int | None]()

        def seen_step() -> None:
            seen.append(worker.running_step)
            step()

        monkeypatch.setattr(worker._engine, "step", seen_step)
        assert worker.running_step is None
        assert [await said(model) for _ in range(2)] == ["Yes."] * 2
        assert seen == [*range(len(seen))]
        assert len(seen) >= 2 * len("Yes.")
        await until(lambda: worker.running_step is None)


@pytest.mark.anyio
@pytest.mark.parametrize("ask", [Worker.call, Worker.call_alone])
async def test_an_error_of_what_the_engine_ran_goes_with_whoever_has_caught_it(
    ask: Callable[..., Awaitable[object]],
) -> None:
    def fail(*args: object) -> None:
        raise KnownError

    async with fake_model("Yes.") as model:
        await goes_when_caught(partial(ask, model._insides.worker, fail))
