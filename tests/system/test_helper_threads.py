"""Threads that wait for the next function: how many there are, and when they end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from functools import partial

import anyio
import pytest

from paged_sdk.errors import EngineError
from paged_sdk.system import helper_threads
from paged_sdk.system.helper_threads import HelperThreads
from talk import until

pytestmark = pytest.mark.anyio


def has_ended_as_garbage(thread: threading.Thread) -> bool:
    gc.collect()
    return not thread.is_alive()


async def test_a_thread_runs_one_function_after_the_other() -> None:
    threads = HelperThreads(2)
    ran = [await threads.run(threading.current_thread, "to test in") for _ in range(5)]
    assert len(set(ran)) == 1
    assert ran[0].is_alive()


async def test_no_more_run_at_a_time_than_may_those_included_that_nobody_waits_for() -> None:
    threads, go_on = HelperThreads(2), threading.Event()
    begun: list[int] = []

    def wait(number: int) -> None:
        begun.append(number)
        go_on.wait(60)

    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(threads.run, partial(wait, number), "to test in")
        await until(lambda: len(begun) == 2)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        for number in range(2, 6):
            tasks.start_soon(threads.run, partial(wait, number), "to test in")
        await anyio.wait_all_tasks_blocked()
        assert set(begun) == {0, 1}
        go_on.set()
    assert set(begun) == set(range(6))


async def test_whoever_finds_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = HelperThreads(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineError, match="no thread to test in"):
            await threads.run(lambda: None, "to test in")
    with anyio.fail_after(60):
        assert await threads.run(lambda: 1, "to test in") == 1


async def test_threads_end_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, all_are_there = HelperThreads(3), threading.Barrier(3, timeout=60)
    ran: list[threading.Thread] = []
    monkeypatch.setattr(helper_threads, "IDLE_SECONDS", 0.01)

    def meet() -> None:
        ran.append(threading.current_thread())
        all_are_there.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(threads.run, meet, "to test in")
    assert len(set(ran)) == 3
    await until(lambda: not any(thread.is_alive() for thread in ran))
    assert await threads.run(threading.current_thread, "to test in") not in ran


async def test_they_end_with_what_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_threads, "IDLE_SECONDS", 3600.0)
    threads, go_on = HelperThreads(2), threading.Event()
    idle = await threads.run(threading.current_thread, "to test in")
    del threads
    await until(lambda: has_ended_as_garbage(idle))
    running: list[threading.Thread] = []

    def wait() -> None:
        running.append(threading.current_thread())
        go_on.wait(60)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(HelperThreads(1).run, wait, "to test in")
        await until(lambda: bool(running))
        tasks.cancel_scope.cancel()
    go_on.set()
    await until(lambda: has_ended_as_garbage(running[0]))


def test_one_ends_whose_event_loop_is_closed_amid_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_threads, "IDLE_SECONDS", 3600.0)
    go_on, running = threading.Event(), list[threading.Thread]()

    def stop() -> None:
        loop = asyncio.new_event_loop()

        def wait() -> None:
            running.append(threading.current_thread())
            loop.call_soon_threadsafe(loop.stop)
            go_on.wait(60)

        task = loop.create_task(HelperThreads(1).run(wait, "to test in"))
        loop.run_forever()
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    stop()
    go_on.set()
    deadline = time.monotonic() + 60
    while not has_ended_as_garbage(running[0]):
        assert time.monotonic() < deadline
