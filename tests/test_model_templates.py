"""What a template that does not end does to a model's requests, and to the program."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import anyio
import pytest
from attrs import evolve

from paged_sdk import InvalidRequestError, Model, RequestBuilder, RequestTimeoutError, SamplingParams
from paged_sdk.chat.sandbox import RenderLimits
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.testing import fake_model

pytestmark = pytest.mark.anyio

ENDLESS = (
    "{% if messages[0].content == 'bomb' %}{% set ns = namespace(x=3) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x is odd }}{% endif %}"
    "{{ messages[0].content }}"
)
"""A template that the messages of one user make endless."""
BOMB = RequestBuilder().add_message("user", "bomb")
PATIENT = RenderLimits(max_seconds=1000)
"""It lets a template run far longer than a test may take."""
HELLO = RequestBuilder().add_message("user", "Hello!").with_sampling(SamplingParams(max_len=3))


def model_with(source: str, limits: RenderLimits | None = None) -> Model:
    """Return a model with this template."""
    model = fake_model("abcdef")
    template = ChatTemplate(source, {}, limits=limits)
    preparer = evolve(model._preparer, text=evolve(model._preparer.text, template=template))
    model._preparer, model._generation = preparer, evolve(model._generation, preparer=preparer)
    return model


async def test_a_timeout_ends_the_rendering() -> None:
    async with model_with(ENDLESS, PATIENT) as model:
        with pytest.raises(RequestTimeoutError):
            await model.send_chat_request(BOMB.with_timeout(0.2))
        await idle(model)


async def test_cancelling_ends_the_rendering() -> None:
    async with model_with(ENDLESS, PATIENT) as model:
        stream = model.stream_chat_request(BOMB)
        with anyio.move_on_after(0.2):
            await anext(stream)
        await idle(model)
        assert (await stream.collect()).choices[0].finish_reason == "canceled"


async def test_others_are_answered_meanwhile() -> None:
    async with model_with(ENDLESS) as model, anyio.create_task_group() as tasks:
        tasks.start_soon(swallow, model, BOMB.with_timeout(3))
        await anyio.sleep(0.2)
        assert (await model.send_chat_request(HELLO)).choices[0].message.content == "abc"
        tasks.start_soon(swallow, model, BOMB.with_timeout(0.3))
        await anyio.sleep(0.1)
        assert (await model.send_chat_request(HELLO)).choices[0].message.content == "abc"
        tasks.cancel_scope.cancel()


async def test_the_limit_is_named() -> None:
    async with model_with(ENDLESS, RenderLimits(max_seconds=0.2)) as model:
        with pytest.raises(InvalidRequestError, match=r"longer than 0\.2 seconds") as caught:
            await model.send_chat_request(BOMB)
        assert caught.value.field == "messages"
        answers: list[str] = []
        while not answers:  # a busy machine may take longer than the limit even for this
            with suppress(InvalidRequestError):
                answers.append((await model.send_chat_request(HELLO)).choices[0].message.content)
        assert answers == ["abc"]


async def swallow(model: Model, request: RequestBuilder) -> None:
    with pytest.raises((RequestTimeoutError, InvalidRequestError)):
        await model.send_chat_request(request)


async def idle(model: Model) -> None:
    """Wait until no thread of the model's renders."""
    template = model._preparer.text.template
    assert template is not None
    while template._renderer._pool._num_lent:
        await anyio.sleep(0.01)


PROGRAM = """
import asyncio, sys, threading
sys.path[:0] = sys.argv[1:2]
from test_model_templates import BOMB, ENDLESS, model_with
from paged_sdk import BlockingModel

async def main(end):
    model = model_with(ENDLESS)
    task = asyncio.create_task(model.send_chat_request(BOMB))
    await asyncio.sleep(0.3)
    if end == "raises":
        raise SystemExit(3)

if __name__ == "__main__":
    if sys.argv[2] == "thread":
        model = BlockingModel(model_with(ENDLESS))
        threading.Thread(target=model.send_chat_request, args=(BOMB,), daemon=True).start()
    else:
        asyncio.run(main(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("returns", 0, marks=pytest.mark.long),
        ("raises", 3),
        pytest.param("thread", 0, marks=pytest.mark.long),
    ],
)
def test_a_program_ends_while_one_is_rendered(end: str, code: int) -> None:
    run_program(end, code)


@pytest.mark.timing
@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 3), ("thread", 0)])
def test_no_rendering_holds_up_the_end_of_a_program(end: str, code: int) -> None:
    start = time.monotonic()
    run_program(end, code)
    assert time.monotonic() - start < 10


def run_program(end: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, __file__.rpartition("/")[0], end]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == code
