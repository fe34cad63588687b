"""Plain-text completions: what can be said beside the prompt."""

from __future__ import annotations

import gc
from typing import Any, Final

import anyio
import pytest

from paged_sdk import (
    BlockingModel,
    Constraint,
    ContextLengthError,
    InvalidRequestError,
    Model,
    NumericalError,
    QueueFullError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.testing import fake_model
from paged_sdk.types.prompt import PromptLike
from paged_sdk.types.request_options import CompletionOptions, RequestOptions

SAMPLING: Final = SamplingParams(temperature=0, max_len=8)


def processor(token_ids: object, logits: object) -> None: ...


ALL: Final[CompletionOptions] = {
    "priority": 3,
    "timeout": 60.0,
    "cache_salt": "tenant",
    "truncation": True,
    "logits_processors": [processor],
    "prediction": "yes",
    "constraint": Constraint.regex("yes"),
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
        timeout=60.0,
        cache_salt="tenant",
        truncation=True,
        logits_processors=(processor,),
        prediction="yes",
        constraint=Constraint.regex("yes"),
    )
    assert [request.options for request in model.requests] == [expected, expected, RequestOptions()]
    assert {*ALL, "adapter"} == set(CompletionOptions.__annotations__)  # of which a model without weights has none


def test_blocking_models_take_them_too() -> None:
    fake = fake_model("yes", "yes", "y" * 9000, delay=0.01)
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
@pytest.mark.parametrize(
    ("context", "max_len", "num_left"),
    [(64, None, 63 // 4), (64, 10, 9), (64, 1, 0), (64, 1000, 63 // 2), (40_000, None, 4096)],
)
async def test_a_truncated_prompt_leaves_room_for_the_answer(context: int, max_len: int | None, num_left: int) -> None:
    async with fake_model("y" * 5000, max_model_len=context) as model:
        response = await model.send_completion_request("x" * 50_000, SamplingParams(max_len=max_len), truncation=True)
        assert response.usage.prompt_tokens == context - 1 - num_left
        assert response.usage.completion_tokens == num_left + 1
        assert response.choices[0].finish_reason == "length"


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


# Several prompts


@pytest.mark.anyio
async def test_several_prompts_are_one_response_with_the_choices_in_order(model: Model) -> None:
    prompts = ["Once upon a time", "There was", "In the end"]
    alone = [await model.send_completion_request(prompt, SAMPLING) for prompt in prompts]
    together = await model.send_completion_request(prompts, SAMPLING)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone]
    assert [choice.finish_reason for choice in together.choices] == [each.choices[0].finish_reason for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(each.usage, name) for each in alone)
    by_id = [await model.tokenize(prompt, add_special_tokens=True) for prompt in prompts]
    assert (await model.send_completion_request(by_id, SAMPLING)).choices == together.choices
    mixed: list[PromptLike] = [prompts[0], by_id[1]]
    assert (await model.send_completion_request(mixed, SAMPLING)).choices == together.choices[:2]
    assert (await model.send_completion_request(prompts[:1], SAMPLING)).choices == alone[0].choices


@pytest.mark.anyio
async def test_each_prompt_has_its_choices_and_logprobs(model: Model) -> None:
    sampling = SamplingParams(max_len=6, n_choices=2, seed=3, top_n_logprobs=2, ignore_eos=True)
    alone = [await model.send_completion_request(prompt, sampling) for prompt in ("Once", "Then")]
    together = await model.send_completion_request(["Once", "Then"], sampling)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    expected = [choice for each in alone for choice in each.choices]
    assert [(choice.text, choice.logprobs) for choice in together.choices] == [
        (choice.text, choice.logprobs) for choice in expected
    ]


@pytest.mark.anyio
async def test_without_a_seed_equal_prompts_get_different_texts(model: Model) -> None:
    sampling = SamplingParams(temperature=2.0, max_len=12, ignore_eos=True)
    response = await model.send_completion_request(["Once"] * 4, sampling)
    assert len({choice.text for choice in response.choices}) > 1


@pytest.mark.anyio
async def test_several_prompts_stream(model: Model) -> None:
    prompts = ["Once upon a time", "There was", "In the end"]
    whole = await model.send_completion_request(prompts, SAMPLING)
    texts = [""] * 3
    reasons: list[str | None] = [None] * 3
    usages = []
    async with model.stream_completion_request(prompts, SAMPLING) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                assert reasons[choice.index] is None
                reasons[choice.index] = choice.finish_reason
            usages.append(chunk.usage)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert usages[-1].total_tokens == whole.usage.total_tokens
    assert stream.response_so_far().choices == whole.choices


@pytest.mark.anyio
async def test_several_prompts_are_batched_and_their_prefix_is_computed_once() -> None:
    async with fake_model("hello") as model:
        response = await model.send_completion_request(["x" * 320 + str(number) for number in range(8)])
        assert [choice.text for choice in response.choices] == ["hello"] * 8
        assert model.stats().prompt_tokens == 320 + 8
        assert response.usage.prompt_tokens_details.cached_tokens == 7 * 320
        assert [request.prompt for request in model.requests] == ["x" * 320 + str(number) for number in range(8)]


@pytest.mark.anyio
async def test_a_refused_prompt_or_an_error_ends_all_of_them() -> None:
    async with fake_model("fine", NumericalError("NaN"), "fine", delay=0.001, max_model_len=64) as model:
        with pytest.raises(ContextLengthError):
            await model.send_completion_request(["a", "x" * 100, "b"])
        assert model.stats().steps == 0
    async with fake_model("x" * 1000, NumericalError("NaN"), delay=0.001) as model:
        with pytest.raises(NumericalError):
            await model.send_completion_request(["a", "b", "c"])
        await idle(model)
    async with fake_model("x" * 9000, delay=0.001, max_num_seqs=1, max_queue=1) as model:
        with pytest.raises(QueueFullError):
            await model.send_completion_request(["a", "b", "c", "d"])
        await idle(model)


@pytest.mark.anyio
async def test_leaving_several_prompts_ends_all_of_them() -> None:
    async with fake_model("x" * 9000, delay=0.001, max_num_seqs=2) as model:
        with pytest.raises(RequestTimeoutError) as caught:
            await model.send_completion_request(["a", "b", "c"], timeout=0.1)
        await idle(model)
        assert caught.value.partial_response is not None
        assert [choice.finish_reason for choice in caught.value.partial_response.choices] == ["canceled"] * 3
        assert caught.value.partial_response.usage.prompt_tokens == 3
        with anyio.move_on_after(0.05):
            await model.send_completion_request(["a", "b", "c"])
        await idle(model)
        async with model.stream_completion_request(["a", "b", "c"]) as stream:
            await anext(stream)
        await idle(model)
        stream = model.stream_completion_request(["a", "b", "c"])
        await anext(stream)
        del stream
        gc.collect()
        await idle(model)


async def idle(model: Model) -> None:
    with anyio.fail_after(20):
        while model.stats().running or model.stats().waiting or model.stats().blocks_used:
            await anyio.sleep(0.001)


def test_blocking_models_take_several_prompts() -> None:
    mixed: list[PromptLike] = ["x", [1, 2]]
    with BlockingModel(fake_model("a", "b", "c")) as model:
        assert [choice.text for choice in model.send_completion_request(mixed).choices] == ["a", "b"]
        chunks = list(model.stream_completion_request(["x"]))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "c"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", []], "prompt"),
        (["a", ""], "prompt"),
        (["a", 5], "prompt = 5"),
        ([5, "a"], "prompt = 'a'"),
        ([[1], 5], "prompt = 5"),
        ([[1, "a"]], "prompt = 'a'"),
        ([[[1]]], r"prompt = \[1\]"),
        (b"abc", "prompt"),
        ([b"abc"], "prompt"),
        (["a", b"abc"], "prompt"),
        (5, "prompt = 5"),
        (None, "prompt = None"),
        ({"a": 1}, "prompt"),
        ([10**6], "prompt = 1000000"),
    ],
)
async def test_a_list_is_one_prompt_or_several_but_never_a_mixture(prompt: Any, message: str) -> None:
    async with fake_model("yes") as model:
        with pytest.raises(InvalidRequestError, match=message):
            await model.send_completion_request(prompt)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompts", "error", "told"),
    [
        ([[1], []], InvalidRequestError, "prompt[1] = []"),
        (["a", [1, 10**6]], InvalidRequestError, "prompt[1] = 1000000"),
        (["a", "b\udcff"], InvalidRequestError, "prompt[1] = 'b\\udcff'"),
        (["b\udcff"], InvalidRequestError, "prompt = 'b\\udcff'"),
        (["a", "b" * 70], ContextLengthError, "prompt[1] has 70 tokens, 63 fit"),
        (["b" * 70], ContextLengthError, "the prompt has 70 tokens, 63 fit"),
    ],
)
async def test_an_error_says_which_of_several_prompts_it_is_about(
    prompts: Any, error: type[InvalidRequestError] | type[ContextLengthError], told: str
) -> None:
    async with fake_model("yes", max_model_len=64) as model:
        with pytest.raises((InvalidRequestError, ContextLengthError)) as raised:
            await model.send_completion_request(prompts)
        assert type(raised.value) is error
        assert str(raised.value).startswith(told)
        assert raised.value.field == ("prompt" if len(prompts) == 1 else "prompt[1]")


@pytest.mark.anyio
async def test_what_a_prompt_is_too_long_for_names_what_there_is_to_cut_it() -> None:
    async with fake_model("yes", max_model_len=64) as model:
        with pytest.raises(ContextLengthError, match="use truncation=True"):
            await model.send_completion_request("b" * 70)
        with pytest.raises(ContextLengthError, match=r"use RequestBuilder\.with_truncation\(\)") as raised:
            await model.send_chat_request([{"role": "user", "content": "b" * 70}])
        error = raised.value
        assert error.field == "messages"
        assert error.advice == "shorten it, or use RequestBuilder.with_truncation()"
        assert str(error) == f"{error.problem}: {error.advice}"


@pytest.mark.anyio
async def test_each_prompt_has_its_own_logprobs() -> None:
    async with fake_model("yes") as model:
        sampling = SamplingParams(prompt_logprobs=1, n_choices=2)
        alone = await model.send_completion_request(["ab"], sampling)
        several = await model.send_completion_request(["ab", "c", "xyz"], sampling)
    assert alone.prompt_logprobs is not None
    assert [choice.prompt_logprobs for choice in alone.choices] == [alone.prompt_logprobs] * 2
    assert several.prompt_logprobs is None
    found = [choice.prompt_logprobs for choice in several.choices]
    said = [each and "".join(token.token for token in each.content) for each in found]
    assert said == ["b", "b", None, None, "yz", "yz"]  # nothing comes before the first
