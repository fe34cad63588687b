"""The fake model for applications' tests: it is a model like any other, but for where its tokens come from."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import anyio
import pytest

from paged_sdk import (
    BlockingModel,
    ChatStream,
    ConfigError,
    ContextLengthError,
    Conversation,
    EngineDeadError,
    InvalidRequestError,
    Model,
    ModelClosedError,
    NumericalError,
    QueueFullError,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
)
from paged_sdk.testing import FakeModel, FakeRequest, fake_model

HI = [{"role": "user", "content": "Hi!"}]


async def said(model: Model, sampling: SamplingParams | None = None) -> str:
    request = RequestBuilder.from_messages(HI)
    response = await model.send_chat_request(request if sampling is None else request.with_sampling(sampling))
    return response.choices[0].message.content


async def idle(model: Model) -> None:
    with anyio.fail_after(10):
        while model.stats().running or model.stats().waiting:
            await anyio.sleep(0.001)


@pytest.mark.anyio
async def test_it_says_its_texts_in_order_and_the_last_one_again() -> None:
    async with fake_model("one", "two ☃", "") as model:
        assert [await said(model) for _ in range(5)] == ["one", "two ☃", "", "", ""]


@pytest.mark.anyio
async def test_it_is_a_model_with_the_figures_of_one() -> None:
    async with fake_model("Hello!") as model:
        response = await model.send_chat_request(HI)
        assert response.choices[0].finish_reason == "stop"
        assert response.model == model.name == "fake"
        # Every byte is a token, and so is the mark at the end.
        assert response.usage.completion_tokens == 7
        assert response.usage.prompt_tokens == len(await model.tokenize("<|im_start|>user\nHi!<|im_end|>\n")) + 11
        assert await model.detokenize(await model.tokenize("ü ☃")) == "ü ☃"
        stats = model.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.completion_tokens == 7


@pytest.mark.anyio
async def test_streams_add_up_and_characters_stay_whole() -> None:
    async with fake_model("ü ☃ 😀", delay=0.001) as model:
        pieces = [choice.delta.content async for chunk in model.stream_chat_request(HI) for choice in chunk.choices]
        assert "".join(pieces) == "ü ☃ 😀"
        # Pieces that wait for a slow reader are joined, so only where they may be cut is certain.
        assert not [piece for piece in pieces if "\ufffd" in piece]


@pytest.mark.anyio
async def test_it_remembers_what_it_was_asked() -> None:
    sampling = SamplingParams(temperature=0.5, max_len=4)
    async with fake_model("yes") as model:
        request = RequestBuilder.from_messages([{"role": "system", "content": "Be brief."}, *HI])
        await model.send_chat_request(request.with_sampling(sampling).with_priority(3))
        await model.send_completion_request("Once", sampling)
        await model.send_completion_request([79, 110])
        with pytest.raises(InvalidRequestError):
            await model.send_chat_request([])
        chat, text, ids = model.requests
    assert [message.content for message in chat.messages] == ["Be brief.", "Hi!"]
    assert (chat.prompt, chat.sampling, chat.options.priority) == (None, sampling, 3)
    assert (text.messages, text.prompt, text.sampling) == ((), "Once", sampling)
    assert ids == FakeRequest(prompt=(79, 110))


@pytest.mark.anyio
async def test_stop_strings_lengths_choices_and_logprobs_are_those_of_any_model() -> None:
    async with fake_model("one two three", "alpha", "beta", "gamma", "x") as model:
        request = RequestBuilder.from_messages(HI)
        stopped = await model.send_chat_request(request.with_sampling(SamplingParams(stop=" th")))
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one two", "stop")
        cut = await model.send_chat_request(request.with_sampling(SamplingParams(max_len=3)))
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("alp", "length")
        several = await model.send_chat_request(request.with_sampling(SamplingParams(n_choices=2, top_n_logprobs=2)))
        assert [choice.message.content for choice in several.choices] == ["beta", "gamma"]
        for choice in several.choices:
            assert choice.logprobs is not None
            assert "".join(token.token for token in choice.logprobs.content[:-1]) == choice.message.content
        with pytest.raises(InvalidRequestError, match="n_choices"):
            await said(model, SamplingParams(n_choices=33))
        assert await said(model) == "x"


@pytest.mark.anyio
async def test_each_of_many_concurrent_requests_gets_its_own() -> None:
    def upper(request: FakeRequest) -> str:
        return request.messages[-1].content.upper()

    async with fake_model(upper) as model:
        asked = [f"question {number}" for number in range(100)]
        responses = await model.send_chat_requests([[{"role": "user", "content": text}] for text in asked])
        assert [response.choices[0].message.content for response in responses] == [text.upper() for text in asked]
        assert model.stats().blocks_used == 0


@pytest.mark.anyio
async def test_texts_follow_the_order_in_which_requests_are_made() -> None:
    numbers = [str(number) for number in range(20)]
    async with fake_model(*numbers) as model:
        responses = await model.send_chat_requests([HI] * 20)
    assert [response.choices[0].message.content for response in responses] == numbers


@pytest.mark.anyio
async def test_an_error_comes_after_the_text_and_leaves_others_alone() -> None:
    async with fake_model("Hel", QueueFullError("full", limit=7), "fine") as model:
        assert await said(model) == "Hel"
        with pytest.raises(QueueFullError, match="full") as caught:
            await said(model)
        assert caught.value.limit == 7
        assert caught.value.request_id
        assert await said(model) == "fine"
    async with fake_model("Hel", error=NumericalError("NaN")) as model:
        stream = model.stream_chat_request(HI)
        with pytest.raises(NumericalError, match="NaN"):
            await stream.collect()
        assert stream.response_so_far().choices[0].message.content == "Hel"
        pieces: list[str] = []
        with pytest.raises(NumericalError, match="NaN"):
            await _read(model.stream_chat_request(HI), pieces)
        assert "".join(pieces) == "Hel"
    error = QueueFullError("full")
    async with fake_model(error=error) as model:
        for _ in range(2):
            with pytest.raises(QueueFullError) as caught:
                await said(model)
            assert caught.value is not error
            assert caught.value.partial_response is not None


@pytest.mark.anyio
async def test_other_exceptions_stop_the_engine_as_a_failing_device_does() -> None:
    async with fake_model("Hel", error=RuntimeError("device lost")) as model:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="device lost") as caught:
                await said(model)
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.anyio
async def test_a_delay_comes_before_every_token() -> None:
    async with fake_model("abc", delay=0.02) as model:
        start = time.monotonic()
        response = await model.send_chat_request(HI)
        assert time.monotonic() - start >= 0.08
        assert response.usage.time_to_first_token_sec >= 0.02


@pytest.mark.anyio
async def test_timeouts_and_cancelling_end_requests_and_free_their_blocks() -> None:
    async with fake_model("x" * 9000, delay=0.01) as model:
        with pytest.raises(RequestTimeoutError) as caught:
            await model.send_chat_request(RequestBuilder.from_messages(HI).with_timeout(0.05))
        assert caught.value.partial_response is not None
        with anyio.move_on_after(0.05):
            await model.send_chat_request(HI)
        async with model.stream_chat_request(HI) as stream:
            await anext(stream)
        assert stream.response_so_far().choices[0].finish_reason == "canceled"
        await idle(model)
        assert model.stats().blocks_used == 0


@pytest.mark.anyio
async def test_a_full_queue_and_a_prompt_that_is_too_long_are_refused() -> None:
    async with fake_model("x" * 9000, delay=0.1, max_num_seqs=1, max_queue=1, max_model_len=1024) as model:
        with pytest.raises(ContextLengthError):
            await model.send_completion_request("x" * 1024)
        async with model.stream_chat_request(HI) as first:
            await anext(first)
            async with model.stream_chat_request(HI):
                with pytest.raises(QueueFullError):
                    await model.send_chat_request(HI)


@pytest.mark.anyio
async def test_closing_does_not_wait_for_a_delay() -> None:
    async with fake_model("never", delay=1000) as model:
        with anyio.move_on_after(0.02):
            await model.send_chat_request(HI)
        start = time.monotonic()
    assert time.monotonic() - start < 500
    with pytest.raises(ModelClosedError):
        await model.send_chat_request(HI)


@pytest.mark.anyio
async def test_a_conversation_keeps_its_turns_and_finds_their_kv() -> None:
    async with fake_model("First answer, of some length.", "Second.") as model:
        chat = Conversation(model, system="Be brief.")
        await chat.send("One?")
        second = await chat.send("Two?")
        assert second.usage.prompt_tokens_details.cached_tokens > 0
        assert [message.content for message in model.requests[1].messages] == [
            "Be brief.",
            "One?",
            "First answer, of some length.",
            "Two?",
        ]


def test_it_serves_synchronous_code() -> None:
    fake = fake_model("Hello!")
    with BlockingModel(fake) as model:
        assert model.send_chat_request(HI).choices[0].message.content == "Hello!"
        assert "".join(c.delta.content for chunk in model.stream_chat_request(HI) for c in chunk.choices) == "Hello!"
    assert len(fake.requests) == 2


def test_a_model_that_is_dropped_ends_its_thread() -> None:
    before = set(threading.enumerate())

    async def leave_one_waiting() -> None:
        model = fake_model("never", delay=1000)
        with anyio.move_on_after(0.02):
            await model.send_chat_request(HI)

    anyio.run(leave_one_waiting)
    gc.collect()
    deadline = time.monotonic() + 30
    while workers := [t for t in set(threading.enumerate()) - before if t.name == "paged-sdk-worker"]:
        assert time.monotonic() < deadline, workers
        time.sleep(0.001)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: fake_model(),
        lambda: fake_model("a", delay=-1),
        lambda: fake_model("a", delay=_any("soon")),
        lambda: fake_model("a", error=_any("broken")),
        lambda: fake_model(_any(5)),
        lambda: fake_model("\ud800"),
        lambda: fake_model("a", max_num_seqs=0),
        lambda: fake_model("a", max_model_len=0),
    ],
)
def test_what_cannot_be_said_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError):
        bad()


@pytest.mark.anyio
async def test_a_function_must_return_a_string() -> None:
    async with fake_model(_any(lambda request: None)) as model:
        with pytest.raises(ConfigError, match="returns a string"):
            await model.send_chat_request(HI)


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys\n"
        "from paged_sdk import BlockingModel\n"
        "from paged_sdk.testing import fake_model\n"
        "with BlockingModel(fake_model('Hello!')) as model:\n"
        "    print(model.send_chat_request([{'role': 'user', 'content': 'Hi!'}]).choices[0].message.content)\n"
        "sys.exit('torch or numpy is loaded' if {'torch', 'numpy'} & set(sys.modules) else 0)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, "Hello!\n"), finished.stderr


def test_its_types_are_those_of_a_model() -> None:
    fake: Model = fake_model("a")
    assert isinstance(fake, FakeModel)


def _any(value: object) -> Any:
    return value


async def _read(stream: ChatStream, pieces: list[str]) -> None:
    async for chunk in stream:
        pieces += [choice.delta.content for choice in chunk.choices]
