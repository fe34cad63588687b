"""What a process may not have or do: more threads, more memory, its parent's threads, the time to finish a build."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from paged_sdk import (
    BlockingModel,
    EngineError,
    InvalidRequestError,
    Model,
    OutOfMemoryError,
    SamplingParams,
    TextModelBuilder,
    blocking_loop,
)
from paged_sdk.models import any_model
from paged_sdk.runner.device import address_space
from paged_sdk.testing import fake_model
from talk import until

LONG = SamplingParams(temperature=0, max_len=2000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_len=3)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let no thread whose name begins like this start, as the system does that has given its last."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("name", ["paged-sdk-worker", "paged-sdk-portal", "paged-sdk call"])
def test_a_build_without_a_thread(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    refuse_threads(monkeypatch, name)
    with pytest.raises(EngineError, match="no more"):
        BlockingModel(builder.build())
    monkeypatch.undo()
    with BlockingModel(builder.build()) as model:
        assert model.send_completion_request("Hello", SHORT).choices


@pytest.mark.anyio
async def test_a_request_without_a_thread(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with builder.build() as model:
        with monkeypatch.context() as patch:
            refuse_threads(patch, "paged-sdk helper")
            with pytest.raises(EngineError, match="no more"):
                await model.send_completion_request("Hello", SHORT)
            with pytest.raises(EngineError, match="no more"):
                await model.tokenize("Hello")
        assert (await model.send_completion_request("Hello", SHORT)).choices


def test_a_close_without_a_thread_leaves_none(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    model = BlockingModel(builder.build())

    with monkeypatch.context() as patch:
        refuse_threads(patch, "paged-sdk call")
        with pytest.raises(EngineError, match="no more"):
            model.close()
    for thread in set(threading.enumerate()) - before:
        while thread in threading.enumerate() and not thread.is_alive():  # somebody is just starting it
            time.sleep(0.001)
        thread.join(60)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), OSError(12, "ENOMEM")],
)
def test_a_build_without_memory(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(any_model, "load_model", fail)
    with pytest.raises(OutOfMemoryError) as caught:
        BlockingModel(builder.build())
    assert caught.value.__cause__ is error
    assert caught.value.path is not None


def test_an_error_that_is_no_lack_of_memory_stays(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(any_model, "load_model", fail)
    with pytest.raises(RuntimeError, match="something else"):
        BlockingModel(builder.build())


def test_a_limit_of_addresses_counts(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_AS
        # Read each time: threads of tests before this one end at any time, and their stacks are free then.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        return used + (64 << 20), resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", limit)
    space = address_space()
    assert space is not None
    assert space.free <= 65 << 20
    with pytest.raises(OutOfMemoryError, match="ulimit -v") as caught:
        BlockingModel(builder.build())
    assert caught.value.needed > caught.value.available


def slow_loading(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have a tensor of the next build take 50 ms, and its thread say that it has begun and that it has ended."""
    begun, ended = threading.Event(), threading.Event()

    def load(*_: object, on_progress: Callable[[int, int], None], **__: object) -> None:
        begun.set()
        try:
            for done in range(1200):
                time.sleep(0.05)
                on_progress(done, 1200)
        finally:
            ended.set()

    monkeypatch.setattr(any_model, "load_model", load)
    return begun, ended


@pytest.mark.anyio
async def test_a_build_can_be_cancelled(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = slow_loading(monkeypatch)

    async def build() -> None:
        await builder.build()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(build)
        await until(begun.is_set)
        tasks.cancel_scope.cancel()
    assert ended.wait(20), "the thread goes on loading"


def test_ctrl_c_ends_a_build(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = slow_loading(monkeypatch)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert begun.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        BlockingModel(builder.build())
    thread.join()
    assert ended.wait(20), "the thread goes on loading"
    assert not any(thread.name == "paged-sdk-portal" for thread in threading.enumerate())


@pytest.mark.parametrize("has_begun", [True, False])
def test_ctrl_c_before_the_event_loop_is_known_ends_it(monkeypatch: pytest.MonkeyPatch, *, has_begun: bool) -> None:
    class InterruptedFuture(Future[Any]):
        is_interrupted = False

        def result(self, timeout: float | None = None) -> Any:
            if not self.is_interrupted:
                self.is_interrupted = True
                if has_begun:
                    super().result(60)
                raise KeyboardInterrupt
            return super().result(60)

    others = set(threading.enumerate())
    monkeypatch.setattr(blocking_loop, "Future", InterruptedFuture)
    with pytest.raises(KeyboardInterrupt):
        BlockingModel(fake_model("Hello!"))
    for thread in threading.enumerate():
        if thread.name == "paged-sdk-portal" and thread not in others:
            thread.join(60)
            assert not thread.is_alive()


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from paged_sdk import BlockingModel, ModelClosedError, SamplingParams, TextModelBuilder
from paged_sdk.runner.model_runner import ModelRunner

submit, steps, may_go_on = ModelRunner.submit, [], threading.Event()

def wait_and_submit(runner, output):  # of the text, what comes first is all that there is
    steps.append(1)
    assert len(steps) == 1 or may_go_on.wait(60)
    return submit(runner, output)

ModelRunner.submit = wait_and_submit

model = BlockingModel(TextModelBuilder(sys.argv[1]).with_dtype("float32").with_force_cpu().with_num_threads(1).build())
sampling = SamplingParams(temperature=0, max_len=500, ignore_eos=True)
stream = model.stream_completion_request("Hello", sampling)
next(stream)
if os.fork() == 0:
    send = lambda: model.send_completion_request("Hello", sampling)
    for use in (send, lambda: next(stream), lambda: model.tokenize("x")):
        try:
            use()
        except ModelClosedError as error:
            assert "fork" in str(error), error
        else:
            raise SystemExit("no error")
    stream.close()
    model.close()
    print("child ends")
    sys.exit(7)  # with everything that runs at exit
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7
may_go_on.set()
print("parent goes on" if next(stream) and model.send_completion_request("Hello", sampling) else "")
"""


def test_a_forked_child_is_told_at_once_and_can_exit(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tiny_checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "child ends" in result.stdout
    assert "parent goes on" in result.stdout


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_models_and_streams_can_be_neither_copied_nor_pickled(take: Callable[[object], object]) -> None:
    with BlockingModel(fake_model("Hello!")) as blocking:
        stream = blocking.stream_completion_request("x")
        for each in (blocking, blocking._model, stream, stream._stream):
            with pytest.raises(TypeError, match=f"a {type(each).__name__} belongs to its process"):
                take(each)
        assert stream.collect().choices[0].text == "Hello!"


STOPPED = """
import asyncio, sys
from paged_sdk.testing import fake_model

async def build():
    return await fake_model("Hello!" * 1000, delay=0.01)

loop = asyncio.new_event_loop()
model = loop.run_until_complete(build())
task = loop.create_task(model.send_chat_request([{"role": "user", "content": "Hi!"}]))

def look():
    loop.stop() if model.stats().running else loop.call_later(0.001, look)

look()
loop.run_forever()
if sys.argv[1] == "closed":
    loop.close()
print("the program ends", task.done())
"""


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_program_ends_whose_event_loop_is_stopped_amid_a_request(loop: str) -> None:
    command = [sys.executable, "-c", STOPPED, loop]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "the program ends False" in result.stdout


STOPPED_AMID_TOOLS = """
import asyncio, json, threading
import anyio
from paged_sdk import RequestBuilder
from paged_sdk.testing import fake_model

stopped = threading.Event()

def quick() -> str:
    anyio.from_thread.run_sync(print, "quick is here")
    return ""

def slow() -> str:
    anyio.from_thread.run_sync(loop.stop)
    assert stopped.wait(60)
    return ""

async def use():
    said = [f'<tool_call>{json.dumps({"name": name, "arguments": {}})}</tool_call>' for name in ("quick", "slow")]
    async with fake_model(*said, "Done.") as model:
        await model.send_chat_with_tools(RequestBuilder().add_message("user", "Hi!").with_tools([quick, slow]))

loop = asyncio.new_event_loop()
task = loop.create_task(use())
loop.run_forever()
stopped.set()
print("the program ends", task.done())
"""


def test_a_program_ends_whose_event_loop_is_stopped_amid_a_tool() -> None:
    command = [sys.executable, "-c", STOPPED_AMID_TOOLS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "quick is here\nthe program ends False" in result.stdout


@pytest.mark.anyio
async def test_the_application_s_threads_may_all_wait_for_the_model() -> None:
    """As those do in which a web framework runs its endpoints: nothing of a request needs one of them."""
    busy, done = threading.Event(), threading.Event()
    answers: list[str] = []

    def hold() -> None:
        busy.set()
        done.wait(60)

    async def use(model: Model) -> None:
        response = await model.send_completion_request("Hello", SHORT)
        answers.append(response.choices[0].text)
        assert (await model.score("ab")).scores

    limiter = anyio.to_thread.current_default_thread_limiter()
    usual, limiter.total_tokens = limiter.total_tokens, 2
    async with anyio.create_task_group() as tasks, fake_model("Yes", "ab") as model:
        tasks.start_soon(anyio.to_thread.run_sync, hold)
        await until(busy.is_set)
        try:
            with anyio.fail_after(30):
                await anyio.to_thread.run_sync(anyio.from_thread.run, use, model, abandon_on_cancel=True)
                tasks.start_soon(anyio.to_thread.run_sync, hold)
                await until(lambda: limiter.available_tokens == 0)
                await model.aclose()
        finally:
            done.set()
            limiter.total_tokens = usual
    assert answers == ["Yes"]


@pytest.mark.anyio
async def test_the_application_s_threads_may_all_wait_for_a_model_that_is_built(tiny_checkpoint: Path) -> None:
    done = threading.Event()
    limiter = anyio.to_thread.current_default_thread_limiter()
    usual, limiter.total_tokens = limiter.total_tokens, 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, partial(done.wait, 60))
        try:
            await until(lambda: limiter.available_tokens == 0)
            with anyio.fail_after(30):
                async with TextModelBuilder(str(tiny_checkpoint)).build() as model:
                    assert (await model.send_completion_request([5], SHORT)).choices[0].text
        finally:
            done.set()
            limiter.total_tokens = usual


@pytest.mark.anyio
async def test_a_stream_is_read_where_it_was_started(builder: TextModelBuilder) -> None:
    """In another thread's event loop it is refused, and goes on where it belongs."""
    async with builder.build() as model:
        sampling = SamplingParams(temperature=0, max_len=20, ignore_eos=True)
        stream = model.stream_completion_request([1, 2, 3], sampling)
        await stream.__aenter__()  # it is started, and nothing of it is read: the first chunk may be the whole

        def elsewhere() -> list[BaseException]:
            errors: list[BaseException] = []

            async def use(read: Callable[[], Any]) -> None:
                try:
                    await read()
                except InvalidRequestError as error:
                    errors.append(error)

            for backend in ("asyncio", "trio"):
                for read in (stream.__anext__, stream.collect, stream.__aenter__):
                    anyio.run(use, read, backend=backend)
            return errors

        errors = await anyio.to_thread.run_sync(elsewhere)
        assert len(errors) == 6
        assert all("another event loop" in str(error) for error in errors)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
        whole = await model.send_completion_request(
            [1, 2, 3], SamplingParams(temperature=0, max_len=20, ignore_eos=True)
        )
        assert text == whole.choices[0].text


def test_a_stream_of_a_loop_that_has_ended(builder: TextModelBuilder) -> None:
    async def start() -> tuple[Model, Any]:
        model = await builder.build()
        stream = model.stream_completion_request([1, 2, 3], LONG)
        await stream.__aenter__()  # nothing of it is read: the first chunk may be the whole
        return model, stream

    async def go_on(model: Model, stream: Any) -> None:
        with pytest.raises(InvalidRequestError, match="another event loop"):
            await stream.__anext__()
        await model.aclose()

    model, stream = anyio.run(start)
    anyio.run(go_on, model, stream)
