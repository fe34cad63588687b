"""Functions run in threads: what they see, what comes back of them, and when who has asked is cancelled."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from paged_sdk.threads import in_anyio_thread
from talk import until

pytestmark = pytest.mark.anyio


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
