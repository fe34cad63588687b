"""Requests that say what their answer will likely be."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from drafting import drafting
from paged_sdk import (
    ChatCompletionResponse,
    InvalidRequestError,
    Model,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment

BASE = SamplingParams(temperature=0.0, max_len=60, ignore_eos=True)
SAMPLINGS = {
    "greedy": BASE,
    "drawn": evolve(BASE, temperature=0.8, min_p=0.01, seed=5),
    "penalized": evolve(BASE, repetition_penalty=1.2, top_n_logprobs=1),
    "stopped": evolve(BASE, stop=["ee"]),
}
ASKED = RequestBuilder().add_message(TextMessageRole.USER, "say it")


def text_of(response: ChatCompletionResponse) -> str:
    return response.choices[0].message.content


def logprobs_of(response: ChatCompletionResponse) -> list[float]:
    logprobs = response.choices[0].logprobs
    return [] if logprobs is None else [each.logprob for each in logprobs.content]


@pytest.mark.thinned("looks_back", "paged", of=1)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("looks_back", [True, False])
@pytest.mark.parametrize("paged", [True, False])
async def test_a_prediction_saves_steps_and_changes_nothing(
    builder: TextModelBuilder, *, paged: bool, looks_back: bool
) -> None:
    builder = builder if paged else builder.without_paged_attn()
    proposer = drafting(8, looks_back=looks_back)
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
    async with Model(parts) as model, builder.build() as plain_model:
        for name, sampling in SAMPLINGS.items():
            request = ASKED.with_sampling(sampling)
            plain = await plain_model.send_chat_request(request)
            text = text_of(plain)
            num_tokens = plain.usage.completion_tokens
            accepted: dict[str, int] = {}
            for kind, prediction in (
                ("right", text),
                ("edited", text[: len(text) // 3] + " and so on " + text[len(text) // 2 :]),
                ("wrong", "something else entirely, at some length"),
            ):
                before = model.stats().steps
                response = await model.send_chat_request(request.with_prediction(prediction))
                num_steps = model.stats().steps - before
                assert text_of(response) == text, (name, kind)
                assert logprobs_of(response) == pytest.approx(logprobs_of(plain), abs=1e-4)
                details = response.usage.completion_tokens_details
                predicted = len(await model.tokenize(prediction))
                assert details.accepted_prediction_tokens + details.rejected_prediction_tokens >= predicted
                accepted[kind] = details.accepted_prediction_tokens
                if kind == "right" and num_tokens > 20:  # its text has other tokens in places than the model chose
                    assert num_steps < num_tokens * 0.7
            assert accepted["wrong"] < accepted["right"]
            assert accepted["right"] >= num_tokens / 4
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
        assert model.stats().blocks_used == 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_that_does_not_look_back_takes_predictions_too(builder: TextModelBuilder) -> None:
    async with builder.build() as model:
        sampling = evolve(BASE, max_len=200)
        plain = await model.send_completion_request([5, 6, 7], sampling)
        assert model.stats().drafted_tokens == 0
        again = await model.send_completion_request([5, 6, 7], sampling, prediction=plain.choices[0].text)
        assert again.choices[0].text == plain.choices[0].text
        assert model.stats().accepted_tokens > 0
        assert again.usage.completion_tokens_details.accepted_prediction_tokens > 20


@pytest.mark.parametrize("content", ["a text", [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]])
def test_a_prediction_may_be_given_as_openai_has_it(content: Any) -> None:
    given = ASKED.with_prediction({"type": "content", "content": content})
    assert given == ASKED.with_prediction("a text")
    assert given.options.prediction == "a text"


@pytest.mark.parametrize(
    "value",
    [
        "",
        None,
        7,
        b"text",
        "\ud800",
        ["text"],
        {},
        {"type": "content"},
        {"type": "text", "content": "a"},
        {"type": "content", "content": ""},
        {"type": "content", "content": []},
        {"type": "content", "content": None},
        {"type": "content", "content": ["a"]},
        {"type": "content", "content": [{"type": "text", "text": 5}]},
        {"type": "content", "content": [{"type": "image_url", "image_url": "a"}]},
        {"type": "content", "content": "a", "more": 1},
    ],
)
def test_what_is_no_prediction_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ASKED.with_prediction(value)
    assert caught.value.field == "prediction"


@pytest.mark.anyio
async def test_a_prediction_that_no_answer_can_be_is_refused(model: Model) -> None:
    limit = model.max_sequence_length
    with pytest.raises(InvalidRequestError, match=rf"more than the context of {limit}") as caught:
        await model.send_chat_request(ASKED.with_prediction("x " * (limit + 1)))
    assert caught.value.field == "prediction"
    assert isinstance(caught.value.value, int)
    assert caught.value.value > limit
    with pytest.raises(InvalidRequestError, match="prediction") as several:
        await model.send_chat_request(ASKED.with_prediction("x").with_sampling(SamplingParams(n_choices=2)))
    assert several.value.field == "n_choices"
    with pytest.raises(InvalidRequestError, match="several prompts"):
        await model.send_completion_request(["a", "b"], prediction="x")
    response = await model.send_chat_request(ASKED.with_prediction("x").with_sampling(BASE))
    assert text_of(response)
