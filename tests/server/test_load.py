"""Many clients at once: some read slowly, some leave, and the server ends under them. Nothing is lost or leaked."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from attrs import field, frozen

from paged_sdk.testing import FakeRequest, fake_model
from program import program
from serving import idle, serving
from slow_fakes import let_end

PATH: Final = "/v1/chat/completions"
STAYS, LEAVES, IS_SLOW = "stays", "leaves", "is slow"


def reply(request: FakeRequest) -> str:
    return request.messages[-1].content * 20


@frozen
class Crowd:
    """Holds clients that ask at once.

    :ivar others_are_done: slow clients read when all others have finished
    """

    port: int
    size: int
    model: str = "fake"
    max_tokens: int = 400
    seed: int = 0
    statuses: Counter[int] = field(factory=Counter)
    whole: list[int] = field(factory=list)
    others_are_done: asyncio.Event = field(factory=asyncio.Event)

    async def come(self) -> None:
        """Have all clients ask, and come back when each has left or has its answer."""
        chance = random.Random(self.seed)
        manners = chance.choices([STAYS, LEAVES, IS_SLOW], [60, 30, 10], k=self.size)
        tasks = [asyncio.create_task(self._ask(number, manner)) for number, manner in enumerate(manners)]
        quick = [task for task, manner in zip(tasks, manners, strict=True) if manner != IS_SLOW]
        await asyncio.gather(*quick)
        self.others_are_done.set()
        await asyncio.gather(*tasks)

    async def come_first(self, size: int) -> None:
        """Have so many clients ask who stay until each has its answer."""
        await asyncio.gather(*(self._ask(number, STAYS) for number in range(size)))

    async def _ask(self, number: int, manner: str) -> None:
        says = f"client {number} ☃ "
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": says}],
                "stream": number % 2 == 0,
                "max_tokens": self.max_tokens,
            }
        ).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2048)
        except ConnectionRefusedError:  # it has ended
            self.statuses[0] += 1
            return
        try:
            writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if manner == LEAVES:
                if number % 3:
                    await reader.read(200)
                return
            if manner == IS_SLOW:
                await self.others_are_done.wait()
            answer = await reader.read()
        except ConnectionError:  # it has ended without having read what this one asks
            answer = b""
        finally:
            writer.transport.abort()
        if not answer:
            self.statuses[0] += 1
            return
        status = int(answer.split(b" ", 2)[1])
        self.statuses[status] += 1
        if status == 200:
            text = text_of(answer, is_streamed=number % 2 == 0)
            assert text == says * 20 or self.model != "fake"
            self.whole.append(number)


def text_of(answer: bytes, *, is_streamed: bool) -> str:
    """Return what a model has said."""
    content = answer.partition(b"\r\n\r\n")[2]
    if not is_streamed:
        message: str = json.loads(content)["choices"][0]["message"]["content"]
        return message
    lines = [line for line in content.split(b"\r\n") if line.startswith(b"data: ")]
    events = [event for line in lines for event in line.decode().split("\n\n") if event]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


SIZES: Final = [40, pytest.param(1000, marks=pytest.mark.long)]


@pytest.mark.parametrize("size", SIZES)
def test_everybody_who_stays_is_answered(size: int) -> None:
    with serving(fake_model(reply, max_num_seqs=64, delay=0.001)) as served:
        crowd = Crowd(served.port, size)
        asyncio.run(crowd.come())
        assert crowd.statuses.keys() == {200}
        assert 0.6 * size < len(crowd.whole) < 0.85 * size
        served.wait(idle)
        served.wait(lambda model: served.app.drain.in_flight == 0)


@pytest.mark.parametrize("size", SIZES)
def test_past_the_queue_it_is_429(size: int) -> None:
    seats, places = 4, size // 6
    model = fake_model(reply, max_num_seqs=seats, max_queue=places, delay=0.05)
    with serving(model) as served:

        async def come() -> Crowd:
            crowd = Crowd(served.port, size)
            # Whoever leaves makes room again, so those that are taken for sure are some who stay, and come first.
            first = asyncio.create_task(crowd.come_first(seats))
            while model.stats().running < seats:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(crowd.come_first(places))
            while model.stats().waiting < places:
                await asyncio.sleep(0.001)
            coming = asyncio.create_task(crowd.come())
            while 429 not in crowd.statuses and not coming.done():
                await asyncio.sleep(0.001)
            let_end(model)  # until then, the first texts went on
            await asyncio.gather(first, second, coming)
            return crowd

        crowd = asyncio.run(come())
        assert crowd.statuses.keys() == {200, 429}
        assert len(crowd.whole) == crowd.statuses[200] >= seats + places
        served.wait(idle)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_taken_before_the_end_is_answered(size: int) -> None:
    """Requests are 200 and whole, or 503; a client that comes after the end finds nobody."""
    with serving(fake_model(reply, max_num_seqs=16, delay=0.001)) as served:

        async def come_and_end() -> Crowd:
            crowd = Crowd(served.port, size)
            coming = asyncio.create_task(crowd.come())
            while served.app.drain.in_flight < size // 4 and not coming.done():
                await asyncio.sleep(0)
            served.app.drain.begin()
            await coming
            return crowd

        crowd = asyncio.run(come_and_end())
        assert crowd.statuses.keys() <= {200, 503, 0}
        assert crowd.whole
        served.wait(lambda _: not served.app.drain.in_flight)  # a client may know before the server that it has left


@pytest.mark.long
def test_a_signal_under_load_loses_nothing(tiny_checkpoint: Path) -> None:
    """As above, with a process and a model that computes: what it took it answers, and it says that it lost nothing."""
    limits = ("--max-seqs", "16", "--max-queue", "300")
    with program("-m", str(tiny_checkpoint), "--served-model-name", "tiny", *limits) as (started, url):

        async def come_and_end() -> Crowd:
            crowd = Crowd(int(url.rpartition(":")[2]), 1000, model="tiny", max_tokens=40)
            coming = asyncio.create_task(crowd.come())
            while len(crowd.whole) < 20 and not coming.done():
                await asyncio.sleep(0)
            started.send_signal(signal.SIGTERM)
            await coming
            return crowd

        crowd = asyncio.run(come_and_end())
        assert started.wait(60) == 0  # 1: requests were cut off
    assert crowd.statuses.keys() <= {200, 429, 503, 0}
    assert len(crowd.whole) == crowd.statuses[200] > 20
