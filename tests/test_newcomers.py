"""What people do first who come from other libraries, and what they are told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paged_sdk import (
    BlockingModel,
    ConfigError,
    ContextLengthError,
    Conversation,
    InvalidRequestError,
    ReplicaSet,
    RequestBuilder,
    TextMessages,
    TextModelBuilder,
    VisionMessages,
)
from paged_sdk.testing import fake_model

HI = [{"role": "user", "content": "Hi!"}]


def test_a_builder_is_not_a_model_yet() -> None:
    building: Any = TextModelBuilder("some/model").build()
    with pytest.raises(AttributeError, match=r"await builder\.build"):
        building.send_chat_request(HI)
    replicas: Any = ReplicaSet([TextModelBuilder("some/model")])
    with pytest.raises(AttributeError, match=r"^ReplicaSet\(\.\.\.\) has no 'send_chat_request': await it"):
        replicas.send_chat_request(HI)
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
@pytest.mark.parametrize(
    "prompts",
    [lambda: (text for text in ("a", "b")), lambda: np.array(["a", "b"]), lambda: np.ones((2, 3), int)],
    ids=["generator", "texts", "ids"],
)
async def test_several_texts_are_a_list(prompts: Callable[[], Any]) -> None:
    async with fake_model("yes") as model:
        for given in (model.send_completion_request, model.embed, model.score):
            several = prompts()
            with pytest.raises(InvalidRequestError, match=r"expected .* or a list or tuple of these$"):
                await given(several)


@pytest.mark.anyio
@pytest.mark.parametrize("messages", [TextMessages(), VisionMessages(), RequestBuilder()])
async def test_messages_are_added_to_what_is_returned(messages: TextMessages | RequestBuilder) -> None:
    messages.add_message("user", "Hi!")  # which leaves it empty
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match=r"at least one message \(add_message returns a new object"):
            await model.send_chat_request(messages)
        with pytest.raises(InvalidRequestError, match=r"at least one message$"):
            await model.send_chat_request([])


@pytest.mark.anyio
async def test_a_chat_that_has_grown_too_long_goes_on_with_its_end() -> None:
    async with fake_model("yes", max_model_len=200) as model:
        chat = Conversation(model)
        await chat.send("And what else is there? " * 4)
        with pytest.raises(ContextLengthError, match=r"RequestBuilder\.with_truncation"):
            await chat.send("And what else is there? " * 4)
        num_turns = len(chat.messages)
        response = await model.send_chat_request(chat.request("Go on.").with_truncation())
        chat.add_turn("Go on.", response.choices[0].message.content)
        assert len(chat.messages) == num_turns + 2


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
