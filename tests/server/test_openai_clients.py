"""OpenAI's own client, as users have it, against a server of fake models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from pydantic import BaseModel

from paged_sdk.testing import FakeModel, FakeRequest, fake_model
from serving import HI, Serving, serving

CALL: Final = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def upper(request: FakeRequest) -> str:
    if request.prompt is not None:
        return str(request.prompt).upper()
    last = request.messages[-1]
    if request.options.shown_tools and last.role.value == "user":
        return last.content if last.content.startswith("<tool_call>") else CALL
    return last.content.upper()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model(upper)) as served:
        yield served


def ask(served: Serving, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return served.openai.chat.completions.create(model="fake", messages=messages, **fields)


def test_a_chat(served: Serving) -> None:
    answer = ask(served, "héllo ☃", n=2, logprobs=True, top_logprobs=2, seed=-1)
    assert [choice.message.content for choice in answer.choices] == ["HÉLLO ☃"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "fake"


def test_a_stream_of_a_chat(served: Serving) -> None:
    chunks = list(ask(served, "héllo ☃", stream=True, max_completion_tokens=7))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "HÉLLO "
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_comes_in_a_chunk_of_its_own(served: Serving) -> None:
    chunks = list(ask(served, "hello", stream=True, stream_options={"include_usage": True}))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == len("HELLO") + 1


def test_the_helpers_join_the_stream(served: Serving) -> None:
    with served.openai.chat.completions.stream(model="fake", messages=HI) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "HI!")


def test_the_asynchronous_client(served: Serving) -> None:
    async def main() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="fake", messages=HI)
            stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(main()) == ("HI!", "HI!")


def test_tools_are_called_and_answered(served: Serving) -> None:
    answer = ask(served, "weather?", tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages: Any = [
        *HI,
        answer.choices[0].message,  # as the client has it, with all its empty fields
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = served.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert after.choices[0].message.content == "RAIN"


def test_calls_of_tools_are_streamed(served: Serving) -> None:
    with served.openai.chat.completions.stream(model="fake", messages=HI, tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert choice.finish_reason == "tool_calls"


def test_without_parallel_calls_there_is_one(served: Serving) -> None:
    twice = CALL + "\n" + CALL
    assert len(ask(served, twice, tools=TOOLS).choices[0].message.tool_calls) == 2
    assert len(ask(served, twice, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    chunks = list(ask(served, twice, tools=TOOLS, parallel_tool_calls=False, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Oslo"}


def test_thoughts_are_apart_from_the_answer() -> None:
    with serving(fake_model("<think>Hm.</think>Yes.")) as served:
        message = ask(served, "?").choices[0].message
        assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
        deltas = [chunk.choices[0].delta.model_dump() for chunk in ask(served, "?", stream=True)]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


class Place(BaseModel):
    name: str


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("is_dumped", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_helpers_have_read_can_be_sent_again(served: Serving, is_streamed: bool, is_dumped: bool) -> None:
    """They add where calls were in a stream, and what they have read of arguments and texts."""
    chats = served.openai.chat.completions
    asked: Any = {"model": "fake", "messages": HI, "tools": [openai.pydantic_function_tool(Weather, name="weather")]}
    if is_streamed:
        with chats.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = chats.parse(**asked).choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")
    said: Any = message.model_dump() if is_dumped else message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    after = chats.create(**asked | {"messages": [*HI, said, result]})
    assert after.choices[0].message.content == "RAIN"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of OpenAI's client, of its own types
def test_what_was_parsed_as_a_type_can_be_sent_again() -> None:
    with serving(fake_model('{"name": "Oslo"}', "Yes.")) as served:
        asked: Any = {"model": "fake", "response_format": Place}
        message: Any = served.openai.chat.completions.parse(messages=HI, **asked).choices[0].message
        assert message.parsed == Place(name="Oslo")
        after = served.openai.chat.completions.create(model="fake", messages=[*HI, message, *HI])
        assert after.choices[0].message.content == "Yes."


def test_answers_are_parsed_as_types(served: Serving) -> None:
    messages: Any = [{"role": "user", "content": '{"name": "x"}'}]
    with serving(fake_model('{"name": "Oslo"}')) as other:
        answer = other.openai.chat.completions.parse(model="fake", messages=messages, response_format=Place)
        model = other.model
        assert isinstance(model, FakeModel)
        constraint = model.requests[0].options.constraint
        assert constraint is not None
        assert constraint.kind == "json_schema"
    assert answer.choices[0].message.parsed == Place(name="Oslo")


def test_completions(served: Serving) -> None:
    answer = served.openai.completions.create(model="fake", prompt=["ab", "cd"], n=2, logprobs=1, max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["AB", "AB", "CD", "CD"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    echoed = served.openai.completions.create(model="fake", prompt=["ab", "cd"], n=2, echo=True)
    assert [choice.text for choice in echoed.choices] == ["abAB", "abAB", "cdCD", "cdCD"]
    scored = served.openai.completions.create(model="fake", prompt="ab", echo=True, logprobs=1).choices[0].logprobs
    assert scored is not None
    assert scored.token_logprobs is not None
    assert scored.token_logprobs[0] is None
    assert len(served.openai.completions.create(model="fake", prompt="x" * 99).choices[0].text) == 16


def test_streams_of_completions(served: Serving) -> None:
    texts = {0: "", 1: ""}
    for chunk in served.openai.completions.create(model="fake", prompt=["ab", "cd"], echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "abAB", 1: "cdCD"}


def test_logprobs_of_a_stream_of_completions_say_where_tokens_are_in_the_text() -> None:
    """Not in the chunk, so that the lists of all chunks are those of the whole text."""
    fields: dict[str, Any] = {"model": "fake", "prompt": ["a", "b"], "logprobs": 0, "max_tokens": 30, "stop": ["|end"]}
    with serving(fake_model("aé日本. Ab", "xy|end", delay=0.001)) as served:
        whole = served.openai.completions.create(**fields)
    with serving(fake_model("aé日本. Ab", "xy|end", delay=0.001)) as served:
        offsets: dict[int, list[int]] = {0: [], 1: []}
        for chunk in served.openai.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    expected = [choice.logprobs and choice.logprobs.text_offset for choice in whole.choices]
    assert expected[0] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6, 7, 8]
    assert (whole.choices[1].text, expected[1]) == ("xy", [0, 1, 2, 3, 4, 5])
    assert [offsets[0], offsets[1]] == expected


def test_a_space_that_may_begin_a_stop_string_is_counted_though_it_comes_after_its_token() -> None:
    fields: dict[str, Any] = {"model": "fake", "prompt": "a", "logprobs": 0, "max_tokens": 30, "stop": [" why"]}
    with serving(fake_model(" world", delay=0.001)) as served:
        offsets: list[int] = []
        for chunk in served.openai.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                offsets += (choice.logprobs and choice.logprobs.text_offset) or []
    assert offsets == [0, 1, 2, 3, 4, 5, 6]


def test_models(served: Serving) -> None:
    assert [model.id for model in served.openai.models.list()] == ["fake"]
    assert served.openai.models.retrieve("fake").owned_by == "paged_sdk"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("other")


def test_several_models_are_served_at_once() -> None:
    sources = {"one": lambda: fake_model("1"), "other/two": lambda: fake_model("2")}
    with serving(sources) as served:
        texts = [
            served.openai.chat.completions.create(model=name, messages=HI).choices[0].message.content
            for name in ("other/two", "one")
        ]
        assert texts == ["2", "1"]
        assert [model.id for model in served.openai.models.list()] == ["one", "other/two"]
        with pytest.raises(openai.NotFoundError, match="there are one, other/two"):
            served.openai.chat.completions.create(model="fake", messages=HI)
