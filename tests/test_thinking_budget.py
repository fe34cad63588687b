"""Requests say after how many tokens a model has thought enough."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paged_sdk import (
    InvalidRequestError,
    Model,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
)
from test_calls_or_json import WEATHER, asked
from test_tools import TELLING

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}<think>\n{# until </think> #}"
GREEDY = SamplingParams(temperature=0, max_len=40, ignore_eos=True)
ASKED = RequestBuilder.from_messages([{"role": "user", "content": "Why?"}]).with_sampling(GREEDY)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[None, SpeculativeConfig(gamma=4)], ids=["plain", "speculating"])
async def model(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> AsyncIterator[Model]:
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = builder.with_chat_template(TEMPLATE).with_prefix_cache_n(None)
    async with builder.with_speculation(request.param).build() as model:
        yield model


async def test_thoughts_end(model: Model) -> None:
    endless = (await model.send_chat_request(ASKED)).choices[0].message
    assert endless.content == ""
    assert endless.reasoning_content is not None
    for budget in (1, 7):
        asked = ASKED.with_thinking_budget(budget)
        message = (await model.send_chat_request(asked)).choices[0].message
        assert message.content
        assert message.reasoning_content is not None
        assert endless.reasoning_content.startswith(message.reasoning_content.rstrip("\ufffd"))
        stream = model.stream_chat_request(asked)
        pieces = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(piece.reasoning_content or "" for piece in pieces) == message.reasoning_content
        assert "".join(piece.content for piece in pieces) == message.content
    late = (await model.send_chat_request(ASKED.with_thinking_budget(1000))).choices[0].message
    assert late == endless
    alone = await model.send_chat_requests([ASKED, ASKED.with_thinking_budget(7)])
    assert [each.choices[0].message for each in alone] == [endless, message]


async def test_what_can_be_a_budget() -> None:
    for budget in (0, -1, 1.5, "many", True):
        with pytest.raises(InvalidRequestError, match="thinking_budget"):
            ASKED.with_thinking_budget(budget)  # type: ignore[arg-type]  # no ints from 1 on


async def test_thoughts_end_with_a_character_where_a_grammar_follows(builder: TextModelBuilder) -> None:
    """No mark may follow a part of one: nothing would be allowed."""
    template = TELLING + "<think>{# </think> #}"
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    requests = [asked(), RequestBuilder().add_message("user", "Where?").with_tools([strict])]
    async with builder.with_chat_template(template).build() as model:
        for seed in range(12):
            sampling = SamplingParams(temperature=1.0, seed=seed, max_len=30)
            few = [request.with_sampling(sampling).with_thinking_budget(7) for request in requests]
            for response in await model.send_chat_requests(few):
                assert "\ufffd" not in (response.choices[0].message.reasoning_content or "")
