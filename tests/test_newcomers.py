"""What people do first who come from other libraries, and what they are told."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from paged_sdk import BlockingModel, ConfigError, InvalidRequestError, TextModelBuilder
from paged_sdk.testing import fake_model

HI = [{"role": "user", "content": "Hi!"}]


def test_a_builder_is_not_a_model_yet() -> None:
    building: Any = TextModelBuilder("some/model").build()
    with pytest.raises(AttributeError, match=r"await builder\.build"):
        building.send_chat_request(HI)
    builder: Any = TextModelBuilder("some/model")
    with pytest.raises(ConfigError, match=r"building = .*build\(\)"):
        BlockingModel(builder)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="asyncio.run awaits any awaitable since Python 3.14")
def test_a_build_is_no_coroutine_but_says_what_to_do() -> None:
    building: Any = TextModelBuilder("some/model").build()
    with pytest.raises(ValueError, match="await it in an async function"):
        asyncio.run(building)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0.5}, "SamplingParams"),
        ({"max_tokens": 5}, "SamplingParams"),
        ({"stream": True}, "priority"),
    ],
)
async def test_an_unknown_option_says_which_there_are(options: Any, told: str) -> None:
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match=told):
            await model.send_completion_request("Once", **options)


@pytest.mark.anyio
@pytest.mark.parametrize("request_", ["Hi!", HI[0]])
async def test_messages_are_a_list(request_: Any) -> None:
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match=r'a list of messages, such as \[{"role": "user"'):
            await model.send_chat_request(request_)


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", [HI, HI[0], None])
async def test_a_completion_continues_a_text(prompt: Any) -> None:
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match="expected a text, or token ids from 0 to"):
            await model.send_completion_request(prompt)


@pytest.mark.anyio
@pytest.mark.parametrize("text", [["Hi!"], b"Hi!", None])
async def test_only_a_text_has_tokens(text: Any) -> None:
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match=r"^text = .* is not allowed: expected a text$"):
            await model.tokenize(text)


@pytest.mark.anyio
async def test_a_printed_model_says_which_it_is() -> None:
    async with fake_model("yes") as model:
        assert repr(model) == f"<{type(model).__name__} {model.name}>"
