"""What a message says beside role and content reaches the template, as in transformers' apply_chat_template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_data import gpt2_like
from transformers import PreTrainedTokenizerFast

from paged_sdk import InvalidRequestError, Message, RequestBuilder, TextMessages
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.types.messages import parse_messages
from paged_sdk.types.tool_call import ToolCall

# Each shows what real templates of that family do with tools, no more.
QWEN25 = """{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = """{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if tool_call.id|length != 9 %}{{- raise_exception("9 characters") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{{- "]" if loop.last else ", " }}
        {%- endfor %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- message["role"] + "(" + (message.name if message.name is defined else "-") + ")" + message["content"] }}
    {%- endif %}
{%- endfor %}"""
EVERYTHING = "{% for message in messages %}{{ message | tojson }}{% endfor %}"

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Łódź", "days": [1, 2.5, None, True], "deep": {"a": {}}}},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How warm is it?", "name": "Ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], "reasoning_content": "I look it up."},
    {"role": "tool", "content": '{"celsius": 20}', "name": "weather", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "20 degrees."},
]


@pytest.mark.parametrize("arguments", [CALL["function"]["arguments"], '{"city": "Paris"}'])  # type: ignore[index]
@pytest.mark.parametrize("source", [QWEN25, MISTRAL])
def test_as_in_transformers(source: str, arguments: Any) -> None:
    chat = json.loads(json.dumps(CHAT))
    chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
    judge: Any = PreTrainedTokenizerFast
    expected = judge(tokenizer_object=gpt2_like()).apply_chat_template(chat, chat_template=source, tokenize=False)
    rendered = ChatTemplate(source, {}).render(parse_messages(chat), add_generation_prompt=False)
    assert rendered == expected
    assert rendered.count("weather") >= 2


def test_every_key_reaches_the_template_and_no_other() -> None:
    rendered = ChatTemplate(EVERYTHING, {}).render(parse_messages(CHAT), add_generation_prompt=False)
    decoder, messages = json.JSONDecoder(), []
    while rendered:
        message, end = decoder.raw_decode(rendered)
        messages.append(message)
        rendered = rendered[end:]
    assert messages == CHAT


def test_messages_that_are_built_are_those_that_are_written() -> None:
    function: Any = CALL["function"]
    built = (
        RequestBuilder()
        .add_message("user", "How warm is it?", name="Ann")
        .add_message("assistant", "", tool_calls=[CALL, ToolCall(function["name"], function["arguments"], "abcdefghi")])
        .add_message("tool", '{"celsius": 20}', name="weather", tool_call_id="abcdefghi")
    )
    expected = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in CHAT[:3]]
    assert built == RequestBuilder(TextMessages(parse_messages(expected)))
    assert [message.to_dict() for message in built.messages] == expected
    assert len({*built.messages}) == 3


def test_a_call_s_arguments_are_a_copy() -> None:
    arguments = {"days": [1]}
    call = ToolCall("weather", arguments)
    arguments["days"].append(2)
    call.to_dict()["function"]["arguments"]["days"].append(3)
    assert call.arguments == {"days": [1]}


def test_keys_that_say_nothing_may_be_there() -> None:
    """OpenAI's client writes every field that a message of the assistant may have."""
    dumped: dict[str, Any] = {
        "content": "Hi",
        "role": "assistant",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert Message.parse(dumped) == Message("assistant", "Hi")
    assert Message.parse(dumped | {"reasoning_content": ""}) == Message("assistant", "Hi")
    call = CALL | {"type": None}
    assert Message.parse(dumped | {"tool_calls": [call]}) == Message("assistant", "Hi", tool_calls=[CALL])


def test_keys_that_say_something_again_may_be_there() -> None:
    """OpenAI's client adds them to what it has joined of a stream, or read as a type."""
    function: Any = CALL["function"]
    call = CALL | {"index": 0, "function": function | {"parsed_arguments": function["arguments"]}}
    found = Message.parse({"role": "assistant", "content": "{}", "parsed": {"a": 1}, "tool_calls": [call]})
    assert found == Message("assistant", "{}", tool_calls=[CALL])


DEEP: Any = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weight": 1}, "message['weight']"),
        ({"name": 5}, "name"),
        ({"name": ""}, "name"),
        ({"tool_call_id": "x"}, "tool_call_id"),
        ({"role": "user", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "reasoning_content": "Hm."}, "reasoning_content"),
        ({"tool_calls": "weather"}, "tool_calls"),
        ({"tool_calls": CALL}, "tool_calls"),
        ({"tool_calls": 5}, "tool_calls"),
        ({"tool_calls": [5]}, "tool_calls"),
        ({"tool_calls": [{"name": "weather", "arguments": {}}]}, "tool_calls"),
        ({"tool_calls": [CALL | {"type": "python"}]}, "tool_calls.type"),
        ({"tool_calls": [CALL | {"weight": 1}]}, "tool_calls['weight']"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}, "index": 1}}]}, "tool_calls.function['index']"),
        ({"tool_calls": [CALL | {"id": 5}]}, "tool_calls.id"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "tool_calls.name"),
        ({"tool_calls": [{"function": {"name": "weather"}}]}, "tool_calls.arguments"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": [1]}}]}, "tool_calls.arguments"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": {"a": b"x"}}}]}, "tool_calls.arguments"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": {"a": float("nan")}}}]}, "tool_calls.arguments"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": {1: 2}}}]}, "tool_calls.arguments"),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": {"a": DEEP}}}]}, "tool_calls.arguments"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_it(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Message.parse({"role": "assistant", "content": "x"} | changes)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400
