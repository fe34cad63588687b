"""Functions run in threads: what they see, what comes back of them, and when who has asked is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from caught_errors import KnownError, goes_when_caught
from paged_sdk.errors import EngineError
from paged_sdk.system.helper_threads import HelperThreads
from paged_sdk.system.threads import in_anyio_thread, in_own_thread
from talk import until

pytestmark = pytest.mark.anyio

Run = Callable[[Callable[[], Any], str], Coroutine[Any, Any, Any]]


async def in_helper_thread(function: Callable[[], Any], purpose: str) -> Any:
    return await HelperThreads(1).run(function, purpose)


every_way = pytest.mark.parametrize("run", [in_own_thread, in_helper_thread, in_anyio_thread])
of_ours = pytest.mark.parametrize("run", [in_own_thread, in_helper_thread])


@every_way
async def test_it_runs_elsewhere_with_a_copy_of_the_context(run: Run) -> None:
    told: contextvars.ContextVar[str] = contextvars.ContextVar("told")
    told.set("here")

    def look() -> tuple[threading.Thread, str]:
        before = told.get()
        told.set("there")
        return threading.current_thread(), before

    thread, said = await run(look, "to test in")
    assert thread is not threading.current_thread()
    assert (said, told.get()) == ("here", "here")


@every_way
async def test_it_runs_outside_the_event_loop(run: Run) -> None:
    async def backend() -> str:
        await anyio.lowlevel.checkpoint()
        return anyio.get_cancelled_exc_class().__module__.partition(".")[0]

    for name in ("asyncio", "trio"):
        assert await run(partial(anyio.run, backend, backend=name), "to test in") == name


@every_way
@pytest.mark.parametrize("kind", [KnownError, SystemExit, KeyboardInterrupt])
async def test_what_it_raises_is_raised_here(run: Run, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("no")

    with pytest.raises(kind) as caught:
        await run(fail, "to test in")
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@of_ours
async def test_an_error_goes_with_whoever_has_caught_it(run: Run) -> None:
    def fail() -> None:
        raise KnownError

    await goes_when_caught(partial(run, fail, "to test in"))


@every_way
async def test_whoever_is_cancelled_does_not_wait(run: Run) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, wait, "to test in")
            await until(begun.is_set)
            tasks.cancel_scope.cancel()
        assert not ended.is_set()
    finally:
        go_on.set()
    await until(ended.is_set)


@every_way
async def test_nothing_is_run_for_whoever_has_been_cancelled(run: Run) -> None:
    ran = threading.Event()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run(ran.set, "to test in")
    assert scope.cancelled_caught
    assert not ran.is_set()


async def test_whoever_does_not_abandon_it_waits() -> None:
    begun, go_on, came = threading.Event(), threading.Event(), []

    def wait() -> str:
        begun.set()
        assert go_on.wait(60)
        return "done"

    async def use() -> None:
        came.append(await in_own_thread(wait, "to test in", abandon_on_cancel=False))
        await anyio.lowlevel.checkpoint()
        came.append("more")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        await until(begun.is_set)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            go_on.set()
    assert came == ["done"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nor_does_a_cancellation_of_asyncio_s_own_abandon_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    task = asyncio.create_task(in_own_thread(wait, "to test in", abandon_on_cancel=False))
    await until(begun.is_set)
    for _ in range(2):
        task.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()


@of_ours
async def test_where_no_thread_can_be_started(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(EngineError, match=r"no thread to test in: .*no more"):
        await run(lambda: None, "to test in")


async def test_at_the_interpreter_s_end_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await in_own_thread(threading.current_thread, "to test in") is threading.current_thread()


async def test_applications_functions_find_the_event_loop() -> None:
    here = threading.current_thread()

    async def cancel(scope: anyio.CancelScope) -> None:
        scope.cancel()
        await anyio.lowlevel.checkpoint()

    def use(scope: anyio.CancelScope) -> str:
        assert anyio.from_thread.run_sync(threading.current_thread) is here
        anyio.from_thread.check_cancelled()
        with suppress(BaseException):  # trio ends what runs for who has been cancelled
            anyio.from_thread.run(cancel, scope)
        try:
            anyio.from_thread.check_cancelled()
        except BaseException:
            told.set()
        return "unheard"

    told = threading.Event()
    with anyio.CancelScope() as scope:
        await in_anyio_thread(partial(use, scope), "to test in")
    assert scope.cancelled_caught
    await until(told.is_set)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_applications_threads_end_and_leave_nothing() -> None:
    threads = [await in_anyio_thread(threading.current_thread, "to test in") for _ in range(10)]
    assert len(set(threads)) == 10
    await until(lambda: not any(thread.is_alive() for thread in threads))
    gone = [weakref.ref(thread) for thread in threads]
    threads.clear()
    await until(lambda: not any(thread() for thread in gone))


ENDS = """
import asyncio, os, sys, threading, time
from functools import partial
from paged_sdk.system.helper_threads import HelperThreads
from paged_sdk.system.threads import in_own_thread

begun = threading.Event()

def compute():
    begun.set()
    loop.call_soon_threadsafe(loop.stop)
    time.sleep(0.2)
    print("it has ended", flush=True)

def wait():
    loop.call_soon_threadsafe(loop.stop)
    threading.Event().wait()

async def helper():
    await HelperThreads(1).run(compute, "to test in")

ways = {"helper": helper,
        "own": partial(in_own_thread, compute, "to test in"),
        "daemon": partial(in_own_thread, wait, "to test in", daemon=True)}
loop = asyncio.new_event_loop()
task = loop.create_task(ways[sys.argv[1]]())
loop.run_forever()
if "fork" in sys.argv and os.fork() == 0:
    print("the child ends", flush=True)
    sys.exit()
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["helper"], {"it has ended"}),
        (["own"], {"it has ended"}),
        (["daemon"], set()),
        (["helper", "fork"], {"it has ended", "the child ends"}),
    ],
)
def test_the_program_waits_for_what_computes_alone(arguments: list[str], said: set[str]) -> None:
    command = [sys.executable, "-c", ENDS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert set(result.stdout.splitlines()) == said
