"""Anthropic's own client, as users have it, against a server of fake models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import pytest
from pydantic import BaseModel

from paged_sdk import GgufModelBuilder, NumericalError, embedded_model_path
from paged_sdk.testing import FakeModel, FakeRequest, fake_model
from serving import HI, Serving, serving

CALL: Final = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOLS: Final[list[Any]] = [
    {
        "name": "weather",
        "description": "Tell the weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def reply(request: FakeRequest) -> str:
    last = request.messages[-1]
    if request.options.shown_tools and last.role.value == "user":
        return last.content if "<tool_call>" in last.content else CALL
    return last.content.upper()


def client_of(served: Serving, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60, **options)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model(reply)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as client:
        yield client


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=99, messages=asked("héllo ☃"), system="Be loud.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "HÉLLO ☃"
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "fake")
    assert message.usage.output_tokens == len("HÉLLO ☃".encode()) + 1
    again = client.messages.create(model="fake", max_tokens=99, messages=asked("héllo ☃"), system="Be loud.")
    cached = again.usage.cache_read_input_tokens
    assert cached
    assert again.usage.input_tokens + cached == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )


def test_models_are_listed_as_this_client_reads_them(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert abs(model.created_at.timestamp() - time.time()) < 3600
    assert client.models.retrieve("fake").created_at == model.created_at


def test_why_a_message_has_ended(client: anthropic.Anthropic) -> None:
    short = client.messages.create(model="fake", max_tokens=2, messages=asked("hello"))
    assert short.stop_reason == "max_tokens"
    stopped = client.messages.create(model="fake", max_tokens=99, messages=asked("hello"), stop_sequences=["X", "LO"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].to_dict()["text"]) == (
        "stop_sequence",
        "LO",
        "HEL",
    )
    with serving(fake_model("a" * 500, max_model_len=128)) as served, client_of(served) as other:
        long = other.messages.create(model="fake", max_tokens=500, messages=asked("hello"))
        assert long.stop_reason == "model_context_window_exceeded"


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=99, messages=asked("hello"), stop_sequences=["LO"]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.content[0].to_dict() == {"type": "text", "text": "HEL", "citations": []}
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "LO")
    whole = client.messages.create(model="fake", max_tokens=99, messages=asked("hello"), stop_sequences=["LO"])
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )


def test_events_have_names(served: Serving) -> None:
    response = served.post("/v1/messages", messages=HI, max_tokens=9, stream=True)
    events = [event.split("\n", 1) for event in response.text.strip().split("\n\n")]
    named = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert all(name == data["type"] for name, data in named)
    assert [name for name, _ in named][:2] == ["message_start", "ping"]
    assert named[0][1]["message"]["usage"]["input_tokens"] > 0


def test_tools_are_called_and_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=99, messages=asked("weather?"), tools=TOOLS)
    (use,) = answer.content
    assert use.type == "tool_use"
    assert (answer.stop_reason, use.name, use.input) == ("tool_use", "weather", {"city": "Oslo"})
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    after = client.messages.create(
        model="fake",
        max_tokens=99,
        messages=[*asked("weather?"), answer.to_param(), {"role": "user", "content": [result]}],
        tools=TOOLS,
    )
    assert after.content[0].to_dict()["text"] == "RAIN"


def test_calls_of_tools_are_streamed(client: anthropic.Anthropic) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}"
    with client.messages.stream(model="fake", max_tokens=999, messages=asked(text), tools=TOOLS) as stream:
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert "".join(inputs) == '{"city": "Oslo"}' * 2
    whole = client.messages.create(model="fake", max_tokens=999, messages=asked(text), tools=TOOLS)
    kinds = [block.type for block in message.content]
    assert kinds == [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"city": "Oslo"}] * 2
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model="fake", max_tokens=999, messages=asked(text), tools=TOOLS, tool_choice=one
    ) as stream:
        message = stream.get_final_message()
    whole = client.messages.create(model="fake", max_tokens=999, messages=asked(text), tools=TOOLS, tool_choice=one)
    assert [block.type for block in message.content] == [block.type for block in whole.content] == ["text", "tool_use"]


def test_thoughts_are_blocks_of_their_own() -> None:
    with serving(fake_model("<think>Hm.</think>Yes.")) as served, client_of(served) as client:
        thinking: Any = {"type": "adaptive"}
        whole = client.messages.create(model="fake", max_tokens=99, messages=HI, thinking=thinking)
        with client.messages.stream(model="fake", max_tokens=99, messages=HI, thinking=thinking) as stream:
            thoughts = [event.thinking for event in stream if event.type == "thinking"]
            streamed = stream.get_final_message()
        assert "".join(thoughts) == "Hm."
        for message in (whole, streamed):
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert message.content[1].to_dict()["text"] == "Yes."
        again = [*HI, whole.to_param(), *asked("?")]
        client.messages.create(model="fake", max_tokens=99, messages=again)
        model = served.model
        assert isinstance(model, FakeModel)
        assert model.requests[-1].messages[1].reasoning_content == "Hm."
        assert model.requests[0].options.enable_thinking is True


class Place(BaseModel):
    name: str


def test_answers_are_parsed_as_types() -> None:
    with serving(fake_model('{"name": "Oslo"}')) as served, client_of(served) as client:
        message = client.messages.parse(model="fake", max_tokens=99, messages=HI, output_format=Place)
        assert message.parsed_output == Place(name="Oslo")
        model = served.model
        assert isinstance(model, FakeModel)
        constraint = model.requests[0].options.constraint
        assert constraint is not None
        assert constraint.kind == "json_schema"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="fake", messages=asked("hello"), system="Be loud.")
    answer = client.messages.create(model="fake", max_tokens=9, messages=asked("hello"), system="Be loud.")
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    with_tools = client.messages.count_tokens(model="fake", messages=asked("hello"), system="Be loud.", tools=TOOLS)
    assert with_tools.input_tokens > count.input_tokens


def test_the_asynchronous_client(served: Serving) -> None:
    async def main() -> tuple[Any, str]:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(model="fake", max_tokens=9, messages=HI)
            async with client.messages.stream(model="fake", max_tokens=9, messages=HI) as stream:
                pieces = [text async for text in stream.text_stream]
            return whole.content[0].to_dict()["text"], "".join(pieces)

    assert asyncio.run(main()) == ("HI!", "HI!")


def test_errors_have_the_form_of_the_api(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="fake", max_tokens=9, messages=HI, extra_body={"min_p": 0.5})
    assert bad.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": bad.value.body["error"]["message"]},  # type: ignore[index]  # a dict
    }
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        client.messages.count_tokens(model="other", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        client.messages.create(
            model="fake",
            max_tokens=9,
            messages=HI,
            output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
        )


def test_a_failure_within_a_stream_is_an_error() -> None:
    with serving(fake_model("ab", error=NumericalError("NaN"))) as failing, client_of(failing) as client:
        stream = client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="NaN"):
            list(stream)


def test_keys_come_as_the_client_sends_them() -> None:
    with serving(fake_model("a"), key="k", api_keys=("k",)) as served:
        with client_of(served) as stranger, pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(model="fake", max_tokens=9, messages=HI)
        with anthropic.Anthropic(base_url=served.url, api_key="k", max_retries=0) as client:
            assert client.messages.create(model="fake", max_tokens=9, messages=HI).content


def test_a_real_model() -> None:
    with serving({"small": GgufModelBuilder(embedded_model_path()).build}) as served, client_of(served) as client:
        fields: Any = {"model": "small", "max_tokens": 8, "messages": asked("Explain gravity in one sentence.")}
        fields["extra_body"] = {"temperature": 0}  # which newer clients have no parameter for
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**fields)
        assert streamed.content[0].to_dict() == whole.content[0].to_dict()
        assert "Gravity" in whole.content[0].to_dict()["text"]
