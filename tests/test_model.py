"""The async API, under asyncio and trio."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from arrivals import Step, num_unheard, obeyed, wait_for_requests
from paged_sdk import (
    ContextLengthError,
    Conversation,
    InvalidRequestError,
    MemoryGpuConfig,
    Model,
    ModelClosedError,
    ModelStats,
    PagedAttentionMeta,
    QueueFullError,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
    TextMessageRole,
    TextMessages,
    TextModelBuilder,
)
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.output import PendingStep
from paged_sdk.scheduler.output import SchedulerOutput
from talk import until

pytestmark = pytest.mark.anyio

QUESTION = TextMessages().add_message(TextMessageRole.USER, "Tell me about paging.")
LONG = SamplingParams(temperature=0, max_len=2000, ignore_eos=True)


def pool(blocks: int, block_size: int = 8) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=block_size, gpu_memory=MemoryGpuConfig.ContextSize(blocks * block_size))


def sampled(length: int, **settings: Any) -> SamplingParams:
    return SamplingParams(max_len=length, ignore_eos=True, **settings)


async def settled(model: Model, *, timeout: float = 60.0) -> ModelStats:
    """Return the stats once the engine is idle, and has heard of all that was asked of it."""
    with anyio.fail_after(timeout):
        await obeyed(model)
        while (stats := model.stats()).running or stats.waiting:
            await anyio.sleep(0.001)
    return stats


def assert_nothing_leaked(stats: ModelStats) -> None:
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def test_a_chat_is_answered(model: Model) -> None:
    response = await model.send_chat_request(QUESTION)
    choice = response.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert response.object == "chat.completion"
    assert response.model == model.name
    usage = response.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.queue_time_sec <= usage.time_to_first_token_sec <= usage.total_time_sec
    assert usage.avg_prompt_tok_per_sec > 0


async def test_bare_messages_are_greedy(model: Model) -> None:
    first = await model.send_chat_request(RequestBuilder.from_messages(QUESTION).with_sampling(sampled(20, seed=1)))
    second = await model.send_chat_request(RequestBuilder.from_messages(QUESTION).with_sampling(sampled(20, seed=2)))
    assert first.choices[0].message.content != second.choices[0].message.content
    greedy = RequestBuilder.from_messages(QUESTION).with_sampling(sampled(20, temperature=0))
    assert (await model.send_chat_request(greedy)).choices == (await model.send_chat_request(greedy)).choices


async def test_a_stream_adds_up_to_the_response(model: Model) -> None:
    request = RequestBuilder.from_messages(QUESTION).with_sampling(sampled(30, temperature=0))
    whole = await model.send_chat_request(request)
    text, usage, reasons = "", None, []
    async with model.stream_chat_request(request) as stream:
        async for chunk in stream:
            text += "".join(choice.delta.content for choice in chunk.choices)
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usage = chunk.usage or usage
            assert chunk.object == "chat.completion.chunk"
    assert text == whole.choices[0].message.content
    assert reasons == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 30
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_completions_take_text_or_token_ids(model: Model) -> None:
    sampling = sampled(12, temperature=0)
    text = await model.send_completion_request("Once upon a time", sampling)
    token_ids = await model.tokenize("Once upon a time", add_special_tokens=True)
    by_id = await model.send_completion_request(token_ids, sampling)
    assert text.choices == by_id.choices
    assert text.usage.completion_tokens == 12
    streamed = [chunk async for chunk in model.stream_completion_request(token_ids, sampling)]
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == text.choices[0].text


async def test_tokenize_round_trip(model: Model) -> None:
    text = "Blocks, tables and 32 tokens."
    assert await model.detokenize(await model.tokenize(text)) == text
    with pytest.raises(InvalidRequestError, match="token_ids"):
        await model.detokenize([10**6])


async def test_n_choices_share_the_prompt(model: Model) -> None:
    request = RequestBuilder.from_messages(QUESTION).with_sampling(sampled(15, temperature=1.5, n_choices=4, seed=7))
    before = model.stats()
    response = await model.send_chat_request(request)
    after = await settled(model)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in response.choices}) == 4
    assert after.prompt_tokens - before.prompt_tokens == response.usage.prompt_tokens
    assert response.usage.completion_tokens == 60
    again = await model.send_chat_request(request)
    assert again.choices == response.choices
    assert_nothing_leaked(await settled(model))


async def test_logprobs(model: Model) -> None:
    sampling = sampled(5, temperature=0, top_n_logprobs=3, prompt_logprobs=2)
    response = await model.send_completion_request("Once upon a time there", sampling)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token_id == token.token_id
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
    assert b"".join(bytes(token.bytes) for token in logprobs.content).decode(errors="replace")
    assert response.prompt_logprobs is not None
    assert len(response.prompt_logprobs.content) == response.usage.prompt_tokens - 1


async def test_stop_strings_end_the_text(model: Model) -> None:
    whole = await model.send_completion_request("Once upon a time", sampled(40, temperature=0))
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = await model.send_completion_request("Once upon a time", sampled(40, temperature=0, stop=stop))
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert_nothing_leaked(await settled(model))


async def test_a_second_turn_computes_only_what_is_new(builder: TextModelBuilder) -> None:
    async with builder.with_paged_attn(pool(64)).build() as model:
        system = "You answer in short sentences about memory and paging."
        chat = Conversation(model, system=system, sampling=sampled(20, temperature=0))
        first = await chat.send("What is a block table?")
        before = model.stats().prompt_tokens
        second = await chat.send("And a slot mapping?")
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        # Everything of the first turn is there but its last, partial block.
        assert cached > first.usage.prompt_tokens - 8
        assert (await settled(model)).prompt_tokens - before == second.usage.prompt_tokens - cached
        assert len(chat.messages) == 5
        await model.reset_prefix_cache()
        assert model.stats().blocks_cached == 0
        third = await chat.send("Thanks.")
        assert third.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_cache_salt_keeps_prefixes_apart(builder: TextModelBuilder) -> None:
    async with builder.with_paged_attn(pool(64)).build() as model:
        request = RequestBuilder().add_message("user", "A prompt of some length, long enough for blocks to be full.")
        cached = []
        for salt in ("a", "b", "a"):
            response = await model.send_chat_request(request.with_cache_salt(salt))
            cached.append(response.usage.prompt_tokens_details.cached_tokens)
        assert cached[:2] == [0, 0]
        assert cached[2] > 0


async def test_sixteen_with_one_prefix_compute_it_once(builder: TextModelBuilder) -> None:
    async with builder.with_paged_attn(pool(400)).build() as model:
        prefix = [5 + i % 500 for i in range(320)]
        prompts = [[*prefix, 300 + i] for i in range(16)]

        async def send(prompt: list[int]) -> None:
            await model.send_completion_request(prompt, sampled(4, temperature=0))

        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(send, prompt)
        assert (await settled(model)).prompt_tokens == 320 + 16


async def test_sixty_four_requests_on_a_pool_for_eight(builder: TextModelBuilder) -> None:
    requests = [
        RequestBuilder().add_message("user", f"Number {i}").with_sampling(sampled(24, temperature=0)) for i in range(64)
    ]
    async with builder.with_paged_attn(pool(256)).with_max_num_seqs(64).build() as model:
        expected = await model.send_chat_requests(requests)
    async with builder.with_paged_attn(pool(8 * 6)).with_max_num_seqs(64).build() as model:
        wait_for_requests(model, len(requests))
        responses = await model.send_chat_requests(requests)
        stats = await settled(model)
        assert [response.choices for response in responses] == [response.choices for response in expected]
        assert stats.preemptions > 0
        assert_nothing_leaked(stats)


async def test_a_sequence_that_outgrows_the_pool_keeps_its_text(builder: TextModelBuilder) -> None:
    async with builder.with_paged_attn(pool(5)).build() as model:
        response = await model.send_completion_request([7, 8, 9], LONG)
        assert response.choices[0].finish_reason == "length"
        assert response.choices[0].text
        assert 5 * 8 - 3 <= response.usage.completion_tokens <= 5 * 8 - 2
        assert_nothing_leaked(await settled(model))


# Ending a request early


async def wait_for_running(model: Model) -> None:
    with anyio.fail_after(60):
        while not model.stats().running:
            await anyio.sleep(0.001)


async def wait_for_waiting(model: Model, number: int) -> None:
    with anyio.fail_after(60):
        while model.stats().waiting < number:
            await anyio.sleep(0.001)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make steps of 10 ms, so that a long request is still under way whatever else the machine does.

    They wait while the event is clear, so that none passes between two statements of a test.
    """
    submit = ModelRunner.submit
    may_go = threading.Event()
    may_go.set()

    def submit_late(runner: ModelRunner, output: SchedulerOutput) -> PendingStep:
        time.sleep(0.01)
        assert may_go.wait(60)
        return submit(runner, output)

    monkeypatch.setattr(ModelRunner, "submit", submit_late)
    yield may_go
    may_go.set()


async def assert_freed_within_two_steps(model: Model, steps_before: int) -> None:
    stats = await settled(model)
    # One step may be in flight when the abort is posted, one more may begin before it is read.
    assert stats.steps - steps_before <= 2
    assert_nothing_leaked(stats)


async def test_cancelling_the_task_frees_the_blocks(model: Model, slow_steps: threading.Event) -> None:
    async def send() -> None:
        await model.send_completion_request([1, 2, 3], LONG)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await wait_for_running(model)
        slow_steps.clear()
        steps = model.stats().steps
        tasks.cancel_scope.cancel()
    slow_steps.set()
    await assert_freed_within_two_steps(model, steps)


async def test_closing_a_stream_frees_the_blocks(model: Model, slow_steps: threading.Event) -> None:
    stream = model.stream_completion_request([1, 2, 3], LONG)
    await stream.__anext__()
    slow_steps.clear()
    steps = model.stats().steps
    await stream.aclose()
    slow_steps.set()
    await assert_freed_within_two_steps(model, steps)
    assert stream.response_so_far().choices[0].finish_reason == "canceled"
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_leaving_the_context_frees_the_blocks(model: Model, slow_steps: threading.Event) -> None:
    async with model.stream_completion_request([1, 2, 3], LONG) as stream:
        await stream.__anext__()
        slow_steps.clear()
        steps = model.stats().steps
    slow_steps.set()
    await assert_freed_within_two_steps(model, steps)


async def test_dropping_a_stream_frees_the_blocks(model: Model, slow_steps: threading.Event) -> None:
    stream = model.stream_completion_request([1, 2, 3], LONG)
    await stream.__anext__()
    slow_steps.clear()
    steps = model.stats().steps
    del stream
    gc.collect()
    slow_steps.set()
    await assert_freed_within_two_steps(model, steps)


@pytest.mark.usefixtures("slow_steps")
async def test_a_timeout_keeps_the_partial_text_and_frees_the_blocks(model: Model) -> None:
    request = RequestBuilder.from_messages(QUESTION).with_sampling(LONG).with_timeout(0.05)
    with pytest.raises(RequestTimeoutError) as caught:
        await model.send_chat_request(request)
    steps = model.stats().steps
    assert caught.value.timeout == 0.05
    assert caught.value.partial_response is not None
    assert caught.value.partial_response.choices[0].finish_reason == "canceled"
    assert caught.value.partial_response.id == caught.value.request_id
    await assert_freed_within_two_steps(model, steps)


async def test_cancelled_before_it_began(model: Model) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await model.send_chat_request(QUESTION)
    assert scope.cancelled_caught
    assert_nothing_leaked(await settled(model))
    assert (await model.send_chat_request(QUESTION)).choices


@pytest.mark.usefixtures("slow_steps")
async def test_the_first_error_ends_the_others(model: Model) -> None:
    bad = RequestBuilder.from_messages(QUESTION).with_sampling(LONG).with_timeout(0.02)
    good = RequestBuilder.from_messages(QUESTION).with_sampling(LONG)
    with pytest.raises(RequestTimeoutError):
        await model.send_chat_requests([good, bad, good])
    assert_nothing_leaked(await settled(model))


# Closing


@pytest.mark.usefixtures("slow_steps")
async def test_closing_ends_what_is_under_way_with_its_text(builder: TextModelBuilder) -> None:
    responses = []

    async def send() -> None:
        responses.append(await model.send_completion_request([1, 2, 3], LONG))

    async with builder.build() as model, anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await wait_for_running(model)
        await model.aclose()
    assert responses[0].choices[0].finish_reason == "canceled"
    assert responses[0].usage.completion_tokens > 0


async def test_draining_finishes_what_is_under_way(builder: TextModelBuilder) -> None:
    responses = []

    async def send() -> None:
        responses.append(await model.send_completion_request([1, 2, 3], sampled(50, temperature=0)))

    async with builder.build() as model, anyio.create_task_group() as tasks:
        step = Step(model)
        tasks.start_soon(send)
        await until(step.is_done.is_set)
        tasks.start_soon(partial(model.aclose, drain=True))
        await until(lambda: num_unheard(model) > 0)
        step.may_end.set()
    assert responses[0].usage.completion_tokens == 50


async def test_use_after_close(builder: TextModelBuilder) -> None:
    async with builder.build() as model:
        pass
    await model.aclose()
    with pytest.raises(ModelClosedError):
        await model.send_chat_request(QUESTION)
    with pytest.raises(ModelClosedError):
        await model.stream_chat_request(QUESTION).__anext__()
    with pytest.raises(ModelClosedError):
        await model.reset_prefix_cache()
    assert model.stats().running == 0


# Bad requests


@pytest.mark.parametrize(
    ("send", "field"),
    [
        (lambda model: model.send_chat_request([]), "messages"),
        (lambda model: model.send_chat_request([{"role": "robot", "content": "x"}]), "role"),
        (lambda model: model.send_completion_request(""), "prompt"),
        (lambda model: model.send_completion_request([]), "prompt"),
        (lambda model: model.send_completion_request([10**6]), "prompt"),
        (lambda model: model.send_completion_request([True]), "prompt"),
        (lambda model: model.send_completion_request("x", SamplingParams(n_choices=33)), "n_choices"),
        (lambda model: model.send_completion_request("x", SamplingParams(logits_bias={10**6: 1})), "logits_bias"),
        (lambda model: model.send_completion_request("x", SamplingParams(stop_token_ids=(10**6,))), "stop_token_ids"),
    ],
)
async def test_a_bad_request_says_what_is_allowed(model: Model, send: Callable[[Model], Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await send(model)
    assert caught.value.field == field
    assert_nothing_leaked(model.stats())


async def test_a_prompt_longer_than_the_context(builder: TextModelBuilder) -> None:
    async with builder.with_max_model_len(64).build() as model:
        with pytest.raises(ContextLengthError, match=r"\(the context is 64\): shorten it, or use trunc") as caught:
            await model.send_completion_request([5] * 64)
        assert (caught.value.num_tokens, caught.value.limit) == (64, 63)
        response = await model.send_completion_request([5] * 63)
        assert response.usage.completion_tokens == 1
        assert response.choices[0].finish_reason in ("length", "stop")


async def test_a_prompt_longer_than_the_pool(builder: TextModelBuilder) -> None:
    async with builder.with_paged_attn(pool(4)).build() as model:
        with pytest.raises(ContextLengthError, match=r"the KV pool is 4 blocks of 8.* more memory$") as caught:
            await model.send_completion_request([5] * 33)
        assert caught.value.limit == 32
        request = RequestBuilder().add_message("user", "word " * 200).with_truncation().with_sampling(sampled(4))
        response = await model.send_chat_request(request)
        assert response.usage.prompt_tokens == 32 - 3
        assert response.usage.completion_tokens == 4


async def test_a_full_queue_refuses(builder: TextModelBuilder) -> None:
    refused = 0

    async def send() -> None:
        nonlocal refused
        try:
            await model.send_completion_request([1, 2, 3], sampled(60))
        except QueueFullError as error:
            assert error.limit == 2
            assert error.request_id
            refused += 1

    async with builder.with_max_num_seqs(1).with_max_queue(2).build() as model:
        async with anyio.create_task_group() as tasks:
            step = Step(model)
            tasks.start_soon(send)
            await until(step.is_done.is_set)  # this one is running
            wait_for_requests(model, 7)
            for _ in range(7):
                tasks.start_soon(send)
            step.may_end.set()
        assert refused == 5
        assert_nothing_leaked(await settled(model))


@pytest.mark.usefixtures("slow_steps")
async def test_priorities_decide_who_goes_first(builder: TextModelBuilder) -> None:
    order: list[str] = []

    async def send(name: str, priority: int) -> None:
        request = RequestBuilder().add_message("user", name).with_sampling(sampled(30)).with_priority(priority)
        await model.send_chat_request(request)
        order.append(name)

    async with (
        builder.with_max_num_seqs(1).build() as model,
        anyio.create_task_group() as tasks,
        model.stream_completion_request([1, 2, 3], LONG) as first,
    ):
        await first.__anext__()
        tasks.start_soon(send, "low", 0)
        await wait_for_waiting(model, 1)
        tasks.start_soon(send, "high", 5)
        await wait_for_waiting(model, 2)
    assert order == ["high", "low"]


# Several models


async def test_two_models_in_one_process(builder: TextModelBuilder, tmp_path: Path) -> None:
    import tiny

    other = TextModelBuilder(tiny.make_checkpoint("qwen3", tmp_path, seed=3)).with_dtype("float32").with_num_threads(1)
    sampling = sampled(20, temperature=0)
    prompt = list(range(5, 40))
    async with builder.build() as alone:
        expected = (await alone.send_completion_request(prompt, sampling)).choices
    async with builder.build() as first, other.build() as second:
        results: dict[str, Any] = {}

        async def send(name: str, model: Model) -> None:
            results[name] = (await model.send_completion_request(prompt, sampling)).choices

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, "first", first)
            tasks.start_soon(send, "second", second)
        assert results["first"] == expected
        assert results["second"] != expected


async def test_building_awaits_and_checks(builder: TextModelBuilder) -> None:
    model = await builder.build()
    try:
        assert model.max_sequence_length == 2048
        assert model.config.paged
    finally:
        await model.aclose()
