"""From the worker's thread to one task, under asyncio and trio."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import pytest

from paged_sdk.engine.events import Outbox, RequestEvent
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.system.event_loop import EventLoop, Waiter
from paged_sdk.types.response import Usage
from paged_sdk.worker.subscription import Subscription

pytestmark = pytest.mark.anyio

USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
END = RequestEvent(request_id="r", finish_reason="stop", usage=USAGE)


def post(subscription: Subscription, *news: int | RequestEvent) -> None:
    """Post from a thread, as a worker does."""
    outbox = Outbox()
    for item in news:
        if isinstance(item, RequestEvent):
            outbox.events.append((subscription, item))
        else:
            outbox.listeners.append(subscription)
            outbox.indices.append(0)
            outbox.token_ids.append([item])
    thread = threading.Thread(target=lambda: subscription.loop.call_soon(outbox.deliver))
    thread.start()
    thread.join()


async def delivered(subscription: Subscription) -> None:
    """Wait until the loop has run what was posted to it so far."""
    ran = anyio.Event()
    assert subscription.loop.call_soon(ran.set)
    await ran.wait()


@pytest.fixture
def num_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count in its one entry how often a task waited."""
    counts = [0]
    make_waiter = EventLoop.waiter

    def counted(loop: EventLoop) -> Waiter:
        counts[0] += 1
        return make_waiter(loop)

    monkeypatch.setattr(EventLoop, "waiter", counted)
    return counts


async def test_what_a_slow_reader_has_missed_lies_there_as_one(num_waits: list[int]) -> None:
    subscription = Subscription(2)
    first, second = (RawLogprobs(token_id, -1.0, ()) for token_id in (5, 6))
    post(subscription, 5, RequestEvent(request_id="r", logprobs=(first,), prompt_logprobs=(second,)))
    post(subscription, 6, RequestEvent(request_id="r", logprobs=(second,)))
    post(subscription, RequestEvent(request_id="r", index=1, finish_reason="length"), END)
    await delivered(subscription)
    await subscription.wait(until_end=False)
    assert num_waits == [0]
    one, other = subscription.choices
    assert (one.token_ids, one.logprobs, one.finish_reason) == ([5, 6], [first, second], "stop")
    assert (other.token_ids, other.logprobs, other.finish_reason) == ([], [], "length")
    assert subscription.prompt_logprobs == {0: (second,)}
    assert subscription.usage == USAGE
    assert subscription.has_ended


async def test_a_step_wakes_a_waiting_reader_once(num_waits: list[int]) -> None:
    subscription = Subscription(1)
    for step in range(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(subscription.wait, until_end=False))
            await anyio.wait_all_tasks_blocked()
            post(subscription, step, RequestEvent(request_id="r", logprobs=(RawLogprobs(step, 0.0, ()),)))
    assert num_waits == [3]
    assert subscription.choices[0].token_ids == [0, 1, 2]


async def test_who_waits_for_the_end_sleeps_until_then(num_waits: list[int]) -> None:
    subscription = Subscription(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(subscription.wait, until_end=True))
        for token_id in range(3):
            await anyio.wait_all_tasks_blocked()
            post(subscription, token_id)
        post(subscription, END)
    assert num_waits == [1]
    assert subscription.choices[0].token_ids == [0, 1, 2]


async def test_an_error_is_an_end() -> None:
    subscription = Subscription(1)
    error = RuntimeError("no")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(subscription.wait, until_end=True))
        await anyio.wait_all_tasks_blocked()
        post(subscription, 7, RequestEvent(request_id="r", error=error))
    assert subscription.error is error
    assert subscription.choices[0].token_ids == [7]


async def test_news_after_a_wait_was_cancelled(num_waits: list[int]) -> None:
    subscription = Subscription(1)
    with anyio.move_on_after(0.01) as scope:
        await subscription.wait(until_end=False)
    assert scope.cancelled_caught
    post(subscription, 7)
    await delivered(subscription)
    await subscription.wait(until_end=False)
    assert num_waits == [1]
    assert subscription.choices[0].token_ids == [7]
