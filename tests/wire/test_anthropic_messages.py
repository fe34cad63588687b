"""Every field of Anthropic's messages is honoured, or asks for nothing, or is refused by its name."""

from __future__ import annotations

import typing
from typing import Any, Final

import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from paged_sdk import InvalidRequestError, PagedError, RequestBuilder, SamplingParams
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.wire.messages import COUNT_TOKENS, MESSAGES, MessagesCall, read_count_tokens, read_messages
from paged_sdk.wire.problem import anthropic_error, problem_of

HI: Final[dict[str, Any]] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi!"}]}
TOOL: Final[dict[str, Any]] = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
BEGUN = [
    {"role": "user", "content": "One, two"},
    {"role": "assistant", "content": [{"type": "text", "text": "three, "}, {"type": "text", "text": "four, "}]},
]


def read(**fields: Any) -> MessagesCall:
    return read_messages({**HI, **fields})


def turns(*turns: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.to_dict() for message in read(messages=list(turns), **fields).request.messages]


def test_every_field_of_the_client_is_known() -> None:
    assert typing.get_type_hints(message_create_params.MessageCreateParamsBase).keys() <= {*MESSAGES.names}
    assert typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams).keys() <= {*COUNT_TOKENS.names}


def test_sampling_is_passed_on() -> None:
    call = read(temperature=0.5, top_p=0.5, top_k=3, stop_sequences=["a", " "])
    expected = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, stop=["a", " "], max_len=9)
    assert call.request.options.sampling == expected


def test_options_are_passed_on() -> None:
    assert read(thinking={"type": "adaptive"}).request.options.enable_thinking is True
    enabled = read(thinking={"type": "enabled", "budget_tokens": 9}).request.options
    assert (enabled.enable_thinking, enabled.thinking_budget) == (True, 9)
    assert read(thinking={"type": "disabled"}).request.options.enable_thinking is False
    assert read(output_config={"effort": "low"}).request.options.reasoning_effort == "low"
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    constraint = read(output_config={"format": form}).request.options.constraint
    assert constraint is not None
    assert constraint.source == '{"type": "integer"}'
    assert read(metadata={"user_id": "u"}).label == "u"
    assert read(stream=True).is_streamed


def test_tools_are_passed_on() -> None:
    form = {"format": {"type": "json_schema", "schema": {}}}
    assert read(tools=[TOOL], output_config=form).request.options.answer_form is AnswerForm.CALLS_OR_JSON
    options = read(tools=[{**TOOL, "description": "d", "strict": True}]).request.options
    assert (options.tools[0].description, options.tools[0].strict, options.tool_choice) == ("d", True, "auto")
    assert read(tools=[TOOL], tool_choice={"type": "any"}).request.options.tool_choice == "required"
    named = read(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).request.options
    assert [tool.name for tool in named.forced_tools] == ["f"]
    hidden = read(tools=[TOOL], tool_choice={"type": "none"}).request.options
    assert hidden.shown_tools == ()
    assert read(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).has_one_call


def test_blocks_become_turns() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
    found = turns(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Wait."},
                use,
                {**use, "id": "c2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "t"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "t"}],
    )
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}} for each in ("c1", "c2")
    ]
    assert found == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: t", "tool_call_id": "c2"},
        {"role": "user", "content": "Go on."},
    ]


def test_images_are_data() -> None:
    for source in (
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        {"type": "url", "url": "data:image/png;base64,AAAA"},
    ):
        call = read(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
        assert [image.data for image in call.request.messages[0].images] == [b"\0\0\0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "standard_only", "speed": "standard", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "thread": None},
        {"container": None, "diagnostics": None, "inference_geo": None, "metadata": {"user_id": None}},
        {"system": None, "tools": [], "tool_choice": None, "thinking": None, "output_config": {}, "stream": False},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    plain = RequestBuilder.from_messages(HI["messages"]).with_sampling(SamplingParams(max_len=9))
    assert read(**fields).request == plain


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c"}, "container"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"thread": {"type": "create"}}, "thread"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}},
            "context_management.edits[0].keep",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "a b"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_p": 0.1}, "min_p"),
        ({"messages": BEGUN, "thinking": {"type": "adaptive"}}, "thinking"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "content[0].type"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(PagedError) as caught:
        read(**fields)
    problem = problem_of(caught.value)
    body = anthropic_error(problem)
    assert problem.status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert name in body["error"]["message"]


def test_an_answer_that_has_begun_is_continued() -> None:
    request = read(messages=BEGUN, thinking={"type": "disabled"}).request
    assert request.options.continue_final_message
    assert [(message.role.value, message.content) for message in request.messages] == [
        ("user", "One, two"),
        ("assistant", "three, four, "),
    ]
    assert not read().request.options.continue_final_message
    assert read_count_tokens({"model": "m", "messages": BEGUN}).request.options.continue_final_message


def test_counting_takes_what_a_prompt_consists_of() -> None:
    assert read_count_tokens({key: HI[key] for key in ("model", "messages")}).request.messages[0].content == "Hi!"
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        read_count_tokens(HI)
