"""Streams of a model without weights, whose every token is known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import pytest

from arrivals import Step
from paged_sdk import (
    BlockingModel,
    InvalidRequestError,
    Model,
    ModelClosedError,
    NumericalError,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
)
from paged_sdk.build.parts import ModelParts
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.engine import EngineConfig
from paged_sdk.engine.engine import Engine
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.model import CompletionStream
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.testing.fake_runner import FakeRunner
from slow_fakes import slow_fake
from talk import until

pytestmark = pytest.mark.anyio

TEXT = "Blocks of memory, tables of blocks – and 🦩 flamingos. The end"
GREEDY = SamplingParams(temperature=0, max_len=200)

Saying: TypeAlias = Callable[..., AbstractAsyncContextManager[Model]]


@pytest.fixture
def saying(smollm2_text: TextProcessor) -> Saying:
    """Return a model that says this, in all choices, and its settings."""

    text = smollm2_text

    @asynccontextmanager
    async def start(said: str = TEXT, **runner: Any) -> AsyncIterator[Model]:
        token_ids = [*text.tokenizer.encode(said, add_special_tokens=False), min(text.stop_token_ids)]

        def next_token(prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
            return token_ids[len(output)]

        config = EngineConfig(num_blocks=64, max_num_seqs=8, max_model_len=256)
        kv = KvCacheManager(config.num_blocks, config.block_size, prefix_caching=True, sliding_window=None)
        vocab_size = text.tokenizer.vocab_size
        parts = ModelParts(
            name="fake",
            model_type="fake",
            architecture="fake",
            engine=Engine(
                Scheduler(config, kv),
                kv,
                FakeRunner(next_token, vocab_size=vocab_size, **runner),
                text.tokenizer,
            ),
            text=text,
            config=config,
            vocab_size=vocab_size,
            hidden_size=1,
            max_sequence_tokens=255,
        )
        async with Model(parts) as model:
            yield model

    return start


async def test_chunks_add_up_and_characters_are_whole(saying: Saying) -> None:
    async with saying() as model:
        second = Step(model, 2)
        stream = model.stream_completion_request([5, 6], GREEDY)
        chunks = [await anext(stream)]
        second.may_end.set()
        chunks += [chunk async for chunk in stream]
        whole = await model.send_completion_request([5, 6], GREEDY)
    assert whole.choices[0].text == TEXT
    assert whole.choices[0].finish_reason == "stop"
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in each for each in texts)
    assert len(texts) > 1
    assert [choice.finish_reason for choice in chunks[-1].choices] == ["stop"]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


async def test_a_slow_reader_gets_what_it_has_missed_as_one_chunk(saying: Saying) -> None:
    async with saying() as model, model.stream_completion_request([5, 6], GREEDY) as stream:
        while (posted := stream._subscription) is None or not posted.has_ended:
            await anyio.sleep(0.001)
        (chunk,) = [chunk async for chunk in stream]
    assert [(choice.text, choice.finish_reason) for choice in chunk.choices] == [(TEXT, "stop")]
    assert chunk.usage is not None


async def test_a_stop_string_is_never_shown(saying: Saying) -> None:
    for stop in ("flamingos. The", "end", "s"):
        sampling = SamplingParams(temperature=0, max_len=200, stop=(stop, "never"))
        async with saying(delay=0.001) as model:
            streamed = [chunk async for chunk in model.stream_completion_request([5, 6], sampling)]
            whole = await model.send_completion_request([5, 6], sampling)
        expected = TEXT[: TEXT.index(stop)]
        assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == expected
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")


async def test_what_was_held_back_comes_with_the_end(saying: Saying) -> None:
    sampling = SamplingParams(temperature=0, max_len=200, stop="The end of it")
    async with saying() as model:
        response = await model.send_completion_request([5, 6], sampling)
    assert response.choices[0].text == TEXT


async def test_a_chunk_has_the_logprobs_of_its_own_tokens(saying: Saying) -> None:
    said = "plain words have whole tokens"
    sampling = SamplingParams(temperature=0, max_len=200, top_n_logprobs=2, prompt_logprobs=1, n_choices=2)
    async with saying(said, delay=0.001) as model:
        texts = ["", ""]
        async for chunk in model.stream_completion_request([5, 6, 7], sampling):
            for choice in chunk.choices:
                assert choice.logprobs is not None
                tokens = [logprob.token for logprob in choice.logprobs.content]
                if choice.finish_reason == "stop":
                    tokens.pop()
                assert "".join(tokens) == choice.text
                texts[choice.index] += choice.text
        assert texts == [said, said]
        response = await model.send_completion_request([5, 6, 7], sampling)
    assert response.prompt_logprobs is not None
    assert [logprob.token_id for logprob in response.prompt_logprobs.content] == [6, 7]


async def test_a_timeout_has_the_text_so_far(saying: Saying) -> None:
    partial = ""
    # On a busy machine there may be no token in time: then there is more of it. Ten steps are not enough for the text.
    for timeout in (0.3, 1.0, 10.0, 60.0):
        request = RequestBuilder().add_message("user", "Hello").with_sampling(GREEDY).with_timeout(timeout)
        async with saying(delay=timeout / 10) as model:
            with pytest.raises(RequestTimeoutError) as caught:
                await model.send_chat_request(request)
        assert caught.value.partial_response is not None
        (choice,) = caught.value.partial_response.choices
        assert choice.finish_reason == "canceled"
        if partial := choice.message.content:  # type: ignore[union-attr]
            break
    assert 0 < len(partial) < len(TEXT)
    assert TEXT.startswith(partial)
    assert caught.value.partial_response is not None
    usage = caught.value.partial_response.usage
    assert usage.prompt_tokens > 1
    assert usage.completion_tokens > 0
    assert usage.total_time_sec > 0


async def test_a_stream_that_is_left_early_says_what_it_has_used(saying: Saying) -> None:
    async with saying() as model:
        second = Step(model, 2)
        stream = model.stream_completion_request([5, 6, 7], GREEDY)
        assert stream.response_so_far().usage.total_tokens == 0  # not sent yet
        async with stream:
            await stream.__anext__()
            await until(second.is_done.is_set)
            third = Step(model)
            second.may_end.set()
            await stream.__anext__()
        usage = stream.response_so_far().usage
        assert usage == stream.response_so_far().usage, "it does not grow any more"
        third.may_end.set()
        whole = (await model.send_completion_request([5, 6, 7], GREEDY)).usage
    assert (usage.prompt_tokens, usage.total_tokens) == (3, 3 + usage.completion_tokens)
    assert 2 <= usage.completion_tokens < whole.completion_tokens
    assert 0 <= usage.queue_time_sec <= usage.time_to_first_token_sec < usage.total_time_sec
    assert usage.avg_compl_tok_per_sec > 0
    assert usage.total_prompt_time_sec > 0


async def test_what_was_read_to_the_end_has_the_engine_s_own_usage(saying: Saying) -> None:
    """A reader that counts, counts as the engine does: the token that ended the text included."""
    async with saying() as model:
        for sampling in (GREEDY, SamplingParams(temperature=0, max_len=200, stop="flamingos", n_choices=2)):
            stream = model.stream_completion_request([5, 6, 7], sampling)
            usage = (await stream.collect()).usage
            stream._parts.usage = None
            counted = stream.response_so_far().usage
            assert counted.completion_tokens == usage.completion_tokens
            assert counted.time_to_first_token_sec == usage.time_to_first_token_sec
            assert counted.prompt_tokens_details == usage.prompt_tokens_details


@pytest.mark.parametrize("at_once", [True, False])
async def test_text_before_an_error_is_kept(saying: Saying, smollm2_text: TextProcessor, *, at_once: bool) -> None:
    def fails(prompt: Sequence[int], output: Sequence[int]) -> str | None:
        return "not finite" if len(output) == 4 else None

    async def read(stream: CompletionStream) -> None:
        async for _ in stream:
            pass

    async with saying(row_failure=fails) as model:
        stream = model.stream_completion_request([5, 6], GREEDY)
        with pytest.raises(NumericalError):
            await (stream.collect() if at_once else read(stream))
    (choice,) = stream.response_so_far().choices
    assert choice.finish_reason == "canceled"
    tokenizer = smollm2_text.tokenizer
    assert choice.text == tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)[:4])


async def test_the_rest_of_a_stream_can_be_collected(saying: Saying) -> None:
    async with saying(delay=0.001) as model:
        stream = model.stream_completion_request([5, 6], GREEDY)
        first = await stream.__anext__()
        assert first.choices[0].text
        response = await stream.collect()
    assert response.choices[0].text == TEXT
    assert stream.response_so_far() == response


@pytest.mark.parametrize("begun", [True, False])
async def test_a_stream_has_one_reader_at_a_time(saying: Saying, *, begun: bool) -> None:
    """The second is told so; the first, and everybody else, read on."""
    refused: list[InvalidRequestError] = []
    texts: list[str] = []

    async def read(stream: CompletionStream) -> None:
        try:
            texts.append("".join([chunk.choices[0].text async for chunk in stream if chunk.choices]))
        except InvalidRequestError as error:
            refused.append(error)

    async with saying() as model:
        step = Step(model)
        stream = model.stream_completion_request("Tell me.", GREEDY)
        if begun:
            await stream.__aenter__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, stream)
            tasks.start_soon(read, stream)
            await until(lambda: len(refused) > 0)
            step.may_end.set()
            other = await model.send_completion_request("Tell me, too.", GREEDY)
        assert texts == [other.choices[0].text] == [TEXT]
        assert [error.request_id for error in refused] == [stream.request_id]
        assert model.stats().blocks_used == 0


async def test_a_stream_that_is_cancelled_before_it_has_begun_has_ended(saying: Saying) -> None:
    """It does not begin anew with whoever reads on, with another deadline."""
    async with saying() as model:
        stream = model.stream_completion_request("Once", GREEDY)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        response = await stream.collect()
        assert response.choices[0].finish_reason == "canceled"
        assert response.usage.total_tokens == 0
        assert model.stats().steps == 0


async def test_a_stream_that_is_closed_before_it_has_begun(saying: Saying) -> None:
    """By another task, while its prompt is made into tokens."""
    async with saying() as model:
        stream = model.stream_completion_request("Tell me.", GREEDY)
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                assert [chunk async for chunk in stream] == []

            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            await stream.aclose()
        assert stream.response_so_far().choices[0].finish_reason == "canceled"
        assert (await model.send_completion_request("Tell me.", GREEDY)).choices[0].text == TEXT
        assert model.stats().completion_tokens < 2 * 30


def test_a_blocking_stream_whose_model_was_closed() -> None:
    """Leaving it is no error: closing the model has ended it."""
    model = BlockingModel(slow_fake())
    with model.stream_completion_request("Tell me.") as stream:
        next(stream)
        model.close()
        with pytest.raises(ModelClosedError):
            list(stream)
