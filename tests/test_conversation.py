"""A conversation keeps what was said, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from paged_sdk import (
    BlockingConversation,
    BlockingModel,
    Conversation,
    Image,
    InvalidRequestError,
    NumericalError,
    RequestBuilder,
    SamplingParams,
    VisionMessages,
)
from paged_sdk.testing import fake_model

pytestmark = pytest.mark.anyio


def said(chat: Conversation) -> list[tuple[str, str]]:
    return [(message.role.value, message.content) for message in chat.messages]


async def test_a_stream_keeps_its_turn_once_its_end_was_read() -> None:
    async with fake_model("Hello!", "Fine.", delay=0.001) as model:
        chat = Conversation(model, system="Be brief.")
        async with chat.stream("Hi!") as stream:
            async for chunk in stream:
                if chunk.usage is None:
                    assert said(chat) == [("system", "Be brief.")]
        assert said(chat) == [("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello!")]
        await chat.stream("How are you?").collect()
        assert said(chat)[3:] == [("user", "How are you?"), ("assistant", "Fine.")]
        assert [message.content for message in model.requests[1].messages] == [
            "Be brief.",
            "Hi!",
            "Hello!",
            "How are you?",
        ]


async def test_an_answer_that_was_cut_by_its_length_is_kept() -> None:
    async with fake_model("Hello!") as model:
        chat = Conversation(model, sampling=SamplingParams(max_len=3))
        await chat.send("Hi!")
        assert said(chat) == [("user", "Hi!"), ("assistant", "Hel")]


async def test_an_answer_that_was_cut_can_be_continued_and_stays_one_turn() -> None:
    async with fake_model("The Rhine", ", the", " Danube") as model:
        chat = Conversation(model, system="Be brief.", sampling=SamplingParams(max_len=9))
        assert (await chat.send("Name rivers.")).choices[0].finish_reason == "length"
        rest = await chat.continue_answer()
        assert rest.choices[0].message.content == ", the"
        assert said(chat)[1:] == [("user", "Name rivers."), ("assistant", "The Rhine, the")]
        async with chat.stream_continued_answer() as stream:
            deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        assert "".join(deltas) == " Danube"
        assert said(chat)[1:] == [("user", "Name rivers."), ("assistant", "The Rhine, the Danube")]
        assert model.requests[2].messages[-1].content == "The Rhine, the"
        assert model.requests[2].options.continue_final_message
        assert model.requests[2].options.sampling == SamplingParams(max_len=9)


async def test_a_continued_answer_changes_nothing_unless_it_is_whole() -> None:
    async with fake_model("Hello!" * 1500, delay=0.001) as model:
        chat = Conversation(model)
        chat.add_turn("Hi!", "Well")
        before = said(chat)
        with anyio.move_on_after(0.02):
            await chat.continue_answer()
        async with chat.stream_continued_answer() as stream:
            await anext(stream)
        assert said(chat) == before
    async with fake_model("Hello!", error=NumericalError("NaN")) as model:
        chat = Conversation(model)
        chat.add_turn("Hi!", "Well")
        with pytest.raises(NumericalError):
            await chat.continue_answer()
        assert said(chat) == before


async def test_only_a_text_of_the_assistant_can_be_continued() -> None:
    def now() -> str:
        return "noon"

    async with fake_model("Hello!") as model:
        for chat in (Conversation(model), Conversation(model, system="Be brief.")):
            with pytest.raises(InvalidRequestError) as caught:
                chat.stream_continued_answer()
            assert caught.value.field == "messages"
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    async with fake_model(call, "It is", " noon.") as model:
        chat = Conversation(model, tools=[now])
        await chat.send("What time is it?")
        await chat.continue_answer()
        assert said(chat)[-1] == ("assistant", "It is noon.")
        assert not model.requests[-1].options.tools


async def test_a_stream_that_is_left_changes_nothing_until_it_is_told() -> None:
    async with fake_model("Hello!" * 1500, delay=0.001) as model:
        chat = Conversation(model)
        async with chat.stream("Hi!") as stream:
            await anext(stream)
        assert said(chat) == []
        so_far = stream.response_so_far().choices[0].message.content
        assert so_far
        chat.add_turn("Hi!", so_far)
        assert said(chat) == [("user", "Hi!"), ("assistant", so_far)]
        with anyio.move_on_after(0.02):
            await chat.send("And?")
        assert len(said(chat)) == 2


async def test_a_stream_that_fails_or_whose_model_is_closed_changes_nothing() -> None:
    async with fake_model("Hello!", error=NumericalError("NaN")) as model:
        chat = Conversation(model)
        with pytest.raises(NumericalError):
            await chat.send("Hi!")
        with pytest.raises(NumericalError):
            [_ async for _ in chat.stream("Hi!")]
        assert said(chat) == []
    async with fake_model("Hello!" * 1500, delay=0.001) as model:
        chat = Conversation(model)
        stream = chat.stream("Hi!")
        await anext(stream)
        await model.aclose()
        assert (await stream.collect()).choices[0].finish_reason == "canceled"
        assert said(chat) == []


async def test_an_answer_with_tools_is_kept_only_if_it_is_whole() -> None:
    def now() -> str:
        return "noon"

    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    async with fake_model(call, "Hello!" * 1500, delay=0.001) as model, anyio.create_task_group() as tasks:
        chat = Conversation(model, tools=[now])

        async def close_soon() -> None:
            while len(model.requests) < 2 or not model.stats().running:
                await anyio.sleep(0.001)
            await model.aclose()

        tasks.start_soon(close_soon)
        response = await chat.send("Hi!")
        assert response.choices[0].finish_reason == "canceled"
        assert said(chat) == []


async def test_a_stream_tells_when_it_is_whole() -> None:
    async with fake_model("Hello!") as model:
        stream = model.stream_completion_request("Hi!")
        told: list[str] = []
        stream.when_whole(lambda response: told.append(response.choices[0].text))
        [_ async for _ in stream]
        await stream.collect()
        assert told == ["Hello!"]


async def test_a_fork_goes_its_own_way() -> None:
    async with fake_model("Hello!", "One.", "Two.") as model:
        chat = Conversation(model, system="Be brief.", sampling=SamplingParams(max_len=20))
        await chat.send("Hi!")
        fork = chat.fork()
        await chat.send("First?")
        await fork.send("Second?")
        assert said(chat)[:3] == said(fork)[:3]
        assert said(chat)[3:] == [("user", "First?"), ("assistant", "One.")]
        assert said(fork)[3:] == [("user", "Second?"), ("assistant", "Two.")]
        assert [request.options.sampling for request in model.requests] == [SamplingParams(max_len=20)] * 3


async def test_a_turn_that_was_begun_before_the_fork_is_kept_where_it_was_begun() -> None:
    async with fake_model("Hello!") as model:
        chat = Conversation(model)
        stream = chat.stream("Hi!")
        fork = chat.fork()
        await stream.collect()
        assert said(chat) == [("user", "Hi!"), ("assistant", "Hello!")]
        assert said(fork) == []


async def test_forks_of_one_prompt_share_its_kv_and_nothing_else() -> None:
    system = "You are the guide of a museum. " * 20
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "Hi!"}]
    turns.append({"role": "assistant", "content": "Welcome!"})
    async with fake_model("Yes.") as model:
        chats = [model.fork(turns, sampling=SamplingParams(max_len=20)) for _ in range(3)]
        cached = []
        for place, chat in enumerate(chats):
            response = await chat.send(f"Question {place}?")
            cached.append(response.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0
        assert min(cached[1:]) > len(system) - model.config.block_size
        assert [said(chat)[3] for chat in chats] == [("user", f"Question {place}?") for place in range(3)]
        assert [message.content for message in model.requests[2].messages] == [
            system,
            "Hi!",
            "Welcome!",
            "Question 2?",
        ]


async def test_a_conversation_begins_with_what_it_is_given() -> None:
    async with fake_model("Yes.") as model:
        pictures = VisionMessages().add_image_message("user", "What is it?", [b"an image"])
        chat = Conversation(model, system="Be brief.", messages=pictures)
        assert [message.role.value for message in chat.messages] == ["system", "user"]
        assert chat.messages[1].images == (Image(b"an image"),)
        assert model.fork([]).messages == ()
        with pytest.raises(InvalidRequestError, match="TextMessages, VisionMessages or a list"):
            model.fork(RequestBuilder().add_message("user", "Hi!"))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.role = 'king'"):
            model.fork([{"role": "user", "content": "Hi!"}, {"role": "king", "content": "Hi!"}])


def test_synchronous_code_has_conversations_too(tmp_path: Path) -> None:
    with BlockingModel(fake_model("One.", "Two.", "Three.", "Four")) as model:
        chat = BlockingConversation(model, system="Be brief.")
        assert chat.send("First?").choices[0].message.content == "One."
        chat.save(tmp_path / "chat.json")
        fork = chat.fork()
        with fork.stream("Second?") as stream:
            assert "".join(chunk.choices[0].delta.content for chunk in stream if chunk.choices) == "Two."
        assert [message.content for message in fork.messages][3:] == ["Second?", "Two."]
        assert len(chat.messages) == 3
        loaded = BlockingConversation.load(model, tmp_path / "chat.json")
        assert loaded.messages == chat.messages
        assert loaded.request("Third?").messages[-1].content == "Third?"
        loaded.add_turn("Third?", "Thr")
        assert loaded.continue_answer().choices[0].message.content == "Three."
        with loaded.stream_continued_answer() as stream:
            stream.collect()
        assert loaded.messages[-1].content == "ThrThree.Four"
        begun = model.fork([{"role": "system", "content": "Be brief."}])
        assert begun.messages == chat.messages[:1]


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"sampling": "greedy"}, "sampling"), ({"max_rounds": 0}, "max_rounds"), ({"tool_timeout": -1.0}, "tool_timeout")],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Conversation(fake_model("Hello!"), **settings)
    assert refused.value.field == field
