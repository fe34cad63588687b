"""Plain-text completions: what can be said beside the prompt."""

from __future__ import annotations

from typing import Any, Final

import pytest

from paged_sdk import (
    BlockingModel,
    ContextLengthError,
    InvalidRequestError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.testing import fake_model
from paged_sdk.types.request import CompletionOptions, RequestOptions

SAMPLING: Final = SamplingParams(temperature=0, max_len=8)


def processor(token_ids: object, logits: object) -> None: ...


ALL: Final[CompletionOptions] = {
    "priority": 3,
    "timeout": 5.0,
    "cache_salt": "tenant",
    "truncation": True,
    "logits_processors": [processor],
}


@pytest.mark.anyio
async def test_every_option_of_a_chat_but_thinking_is_one_of_completions() -> None:
    async with fake_model("yes") as model:
        await model.send_completion_request("Once", SAMPLING, **ALL)
        [_ async for _ in model.stream_completion_request("Once", SAMPLING, **ALL)]
        await model.send_completion_request("Once")
    expected = RequestOptions(
        sampling=SAMPLING,
        priority=3,
        timeout=5.0,
        cache_salt="tenant",
        truncation=True,
        logits_processors=(processor,),
    )
    assert [request.options for request in model.requests] == [expected, expected, RequestOptions()]
    assert set(ALL) == set(CompletionOptions.__annotations__)


def test_blocking_models_take_them_too() -> None:
    fake = fake_model("yes", delay=0.01)
    with BlockingModel(fake) as model:
        assert model.send_completion_request("Once", SAMPLING, **ALL).choices[0].text == "yes"
        assert list(model.stream_completion_request("Once", **ALL))
        with pytest.raises(RequestTimeoutError):
            model.send_completion_request("Once", timeout=0.001)
    assert [request.options.priority for request in fake.requests] == [3, 3, 0]


@pytest.mark.anyio
async def test_a_prompt_is_truncated_only_if_that_is_asked_for() -> None:
    async with fake_model("yes", max_model_len=64) as model:
        with pytest.raises(ContextLengthError):
            await model.send_completion_request("x" * 100, SAMPLING)
        response = await model.send_completion_request("x" * 100, SAMPLING, truncation=True)
        assert response.usage.prompt_tokens < 64


@pytest.mark.anyio
async def test_a_cache_salt_keeps_prefixes_apart() -> None:
    async with fake_model("yes") as model:
        cached = []
        for salt in ("a", "b", "a", None):
            response = await model.send_completion_request("x" * 100, SAMPLING, cache_salt=salt)
            cached.append(response.usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 0, 96, 0]


@pytest.mark.anyio
async def test_logits_processors_change_the_logits(builder: TextModelBuilder) -> None:
    def always_forty_two(token_ids: Any, logits: Any) -> None:
        logits[:] = float("-inf")
        logits[42] = 0.0

    async with builder.build() as model:
        sampling = SamplingParams(temperature=0, max_len=3)
        response = await model.send_completion_request("Once", sampling, logits_processors=[always_forty_two])
        assert response.choices[0].text == await model.detokenize([42, 42, 42])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("timeout", -1),
        ("cache_salt", ""),
        ("truncation", "no"),
        ("logits_processors", "f"),
        ("logits_processors", [3]),
        ("enable_thinking", True),
    ],
)
async def test_what_cannot_be_used_is_named(name: str, value: Any) -> None:
    options: Any = {name: value}
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError) as caught:
            await model.send_completion_request("Once", **options)
        assert name in str(caught.value)
        assert model.requests == ()
