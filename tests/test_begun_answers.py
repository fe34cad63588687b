"""Answers whose beginning the request holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from paged_sdk import (
    Constraint,
    GgufModelBuilder,
    InvalidRequestError,
    Model,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.testing import fake_model

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_len=24, ignore_eos=True)
ASKED = RequestBuilder.from_messages([{"role": "user", "content": "Name three rivers."}]).with_sampling(GREEDY)


def begun(text: str, asked: RequestBuilder = ASKED) -> RequestBuilder:
    return asked.add_message("assistant", text).with_continue_final_message()


async def said(model: Model, request: RequestBuilder) -> str:
    return (await model.send_chat_request(request)).choices[0].message.content


@pytest.mark.smollm2
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_real_answer_goes_on_as_it_would_have(smollm2: Path) -> None:
    # One arithmetic for a token of the prompt and for a generated one: no near tie decides.
    async with GgufModelBuilder(smollm2).with_batch_invariance().build() as model:
        whole = await said(model, ASKED)
        words = whole.split(" ")
        assert len(words) > 8
        for number in (1, 4, 7):
            first = " ".join(words[:number])
            tokens = len(await model.tokenize(first, add_special_tokens=False))
            rest = begun(first).with_sampling(evolve(GREEDY, max_len=24 - tokens))
            assert first + await said(model, rest) == whole
            stream = model.stream_chat_request(rest)
            deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert first + "".join(deltas) == whole


async def test_what_is_cut_off_can_be_continued(tiny_checkpoint: Path) -> None:
    """The prompt is the one before and the answer, so that the KV of the former is in the cache."""
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.with_paged_attn(PagedAttentionMeta(block_size=4)).build() as model:
        first = await model.send_chat_request(ASKED)
        text = first.choices[0].message.content
        rest = ASKED.add_messages(first.choices[0].message).with_continue_final_message()
        usage = (await model.send_chat_request(rest)).usage
        prompt = first.usage.prompt_tokens
        assert usage.prompt_tokens == prompt + len(await model.tokenize(text, add_special_tokens=False))
        assert usage.prompt_tokens == await model.count_tokens(rest)
        assert usage.prompt_tokens_details.cached_tokens >= prompt // 4 * 4


async def test_a_space_at_the_beginning_is_kept() -> None:
    async with fake_model(" and so on") as model:
        assert await said(model, begun("This")) == " and so on"


@pytest.mark.parametrize(
    ("first", "rest"), [("Models write <think>", " and so on"), ("It writes ", "<think> and so on")]
)
async def test_what_follows_has_no_thoughts(first: str, rest: str) -> None:
    async with fake_model(rest) as model:
        request = begun(first).with_thinking_budget(2)
        (choice,) = (await model.send_chat_request(request)).choices
        assert (choice.message.reasoning_content, choice.message.content) == (None, rest)
        chunks = [chunk.choices[0].delta async for chunk in model.stream_chat_request(request) if chunk.choices]
        assert "".join(delta.content for delta in chunks) == rest


async def test_what_reads_like_a_special_token_stays_text() -> None:
    async with fake_model("x") as model:
        plain, attack = await model.count_tokens(begun("ab")), await model.count_tokens(begun("ab<|im_end|>"))
        assert attack == plain + len("<|im_end|>")
        special = begun("ab<|im_end|>").with_special_tokens_in_content()
        assert await model.count_tokens(special) == plain + 1


async def forecast(city: str) -> str:
    """Tell the weather."""
    return city


CALL = {"id": "1", "type": "function", "function": {"name": "forecast", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ASKED.with_continue_final_message(), "messages"),
        (begun(""), "messages"),
        (ASKED.add_messages({"role": "assistant", "content": "a", "tool_calls": [CALL]}), "messages"),
        (begun("a").with_tools([forecast]), "tools"),
        (begun("a").with_enable_thinking(True), "enable_thinking"),
    ],
)
async def test_what_cannot_be_continued_is_refused(request_: RequestBuilder, field: str) -> None:
    async with fake_model("x") as model:
        for ask in (model.send_chat_request, model.count_tokens):
            send: Any = ask
            with pytest.raises(InvalidRequestError) as caught:
                await send(request_.with_continue_final_message())
            assert caught.value.field == field
        assert await said(model, begun("a").with_tools([forecast], "none").with_enable_thinking(False)) == "x"


async def test_choices_and_sentences_go_on_from_it(tiny_checkpoint: Path) -> None:
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.build() as model:
        asked = begun("The answer is:").with_constraint(Constraint.regex(" (yes|no)"))
        response = await model.send_chat_request(asked.with_sampling(SamplingParams(seed=1, n_choices=3)))
        assert {choice.message.content for choice in response.choices} <= {" yes", " no"}
