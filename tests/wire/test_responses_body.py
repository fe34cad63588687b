"""Every field of OpenAI's responses is honoured, or asks for nothing, or is refused by its name."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any, Final

import pytest
from openai.types.responses import input_token_count_params, response_create_params

from paged_sdk import PagedError, RequestBuilder, SamplingParams
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.wire.problem import problem_of, responses_error
from paged_sdk.wire.responses import INPUT_TOKENS, RESPONSES, ResponsesCall, read_input_tokens, read_responses

TOOL: Final[dict[str, Any]] = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
LOGPROBS: Final = ["message.output_text.logprobs"]


def read(**fields: Any) -> ResponsesCall:
    return read_responses({"model": "m", "input": "Hi!", **fields})


def turns(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.to_dict() for message in read(input=list(items), **fields).request.messages]


def test_a_response_repeats_the_temperature_of_its_model() -> None:
    def model(temperature: float | None) -> Any:
        return SimpleNamespace(generation_defaults=SimpleNamespace(temperature=temperature, top_p=None))

    call = read(top_p=0.5)
    for given, expected in ((0.7, 0.7), (0.2, 0.2), (None, 1.0)):
        repeated = call.with_defaults(model(given)).repeated
        assert (repeated["temperature"], repeated["top_p"]) == (expected, 0.5)
    assert read(temperature=0).with_defaults(model(0.7)).repeated["temperature"] == 0


def test_every_field_of_the_client_is_known() -> None:
    assert typing.get_type_hints(response_create_params.ResponseCreateParamsBase).keys() <= {*RESPONSES.names}
    assert typing.get_type_hints(input_token_count_params.InputTokenCountParams).keys() <= {*INPUT_TOKENS.names}


def test_tokens_of_the_same_prompt_are_counted() -> None:
    fields: dict[str, Any] = {"input": "Hi!", "instructions": "Be short.", "tools": [TOOL], "truncation": "auto"}
    counted = read_input_tokens({"model": "m", **fields}).request
    assert counted.with_sampling(SamplingParams()) == read(**fields).request


def test_options_are_passed_on() -> None:
    call = read(temperature=0.5, top_p=0.5, max_output_tokens=7, include=LOGPROBS, top_logprobs=3, truncation="auto")
    assert call.request.options.sampling == SamplingParams(temperature=0.5, top_p=0.5, max_len=7, top_n_logprobs=3)
    assert call.request.options.truncation
    assert read(reasoning={"effort": "low"}).request.options.reasoning_effort == "low"
    assert read(reasoning={"effort": "none"}).request.options.enable_thinking is False
    form = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}, "strict": True}
    constraint = read(text={"format": form}).request.options.constraint
    assert constraint is not None
    assert constraint.source == '{"type": "integer"}'
    assert read(text={"format": {"type": "json_object"}}).request.options.constraint is not None
    either = read(text={"format": {"type": "json_object"}}, tools=[TOOL])
    assert either.request.options.answer_form is AnswerForm.CALLS_OR_JSON
    options = read(tools=[{**TOOL, "strict": True}], tool_choice={"type": "function", "name": "f"}).request.options
    assert [(tool.name, tool.strict) for tool in options.forced_tools] == [("f", True)]
    assert read(tools=[TOOL], tool_choice="required").request.options.tool_choice == "required"
    assert (read(user="u").label, read(user="u", safety_identifier="s").label) == ("u", "s")
    assert read(parallel_tool_calls=False).has_one_call


def test_items_become_turns() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": '{"a": 1}', "id": f"fc_{name}"}

    found = turns(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}],
        },
        call("c1"),
        call("c2"),
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "Done."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Go on."},
        instructions="s",
    )
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}} for each in ("c1", "c2")
    ]
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really.", "reasoning_content": "So."},
        {"role": "user", "content": "Go on."},
    ]


def test_what_the_client_has_read_of_items_may_come_back() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    text = {"type": "output_text", "text": '{"b": 2}'}
    assert turns({"role": "assistant", "content": [text]}, call) == turns(
        {"role": "assistant", "content": [text | {"parsed": {"b": 2}}]},
        call | {"parsed_arguments": {"a": 1}, "async_": None},
    )


def test_images_are_data() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    call = read(input=[{"role": "user", "content": [part]}])
    assert [image.data for image in call.request.messages[0].images] == [b"\0\0\0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "previous_response_id": None, "conversation": None, "background": False, "prompt": None},
        {"service_tier": "auto", "metadata": {"a": "b"}, "truncation": "disabled", "prompt_cache_key": "k"},
        {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}},
        {"include": [], "top_logprobs": 0, "tools": [], "tool_choice": None, "instructions": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    plain = RequestBuilder.from_messages([{"role": "user", "content": "Hi!"}]).with_sampling(SamplingParams())
    assert read(**fields).request == plain


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "a b"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"seed": 1}, "seed"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "\\ud800"}'}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "e"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(PagedError) as caught:
        read(**fields)
    problem = problem_of(caught.value)
    assert problem.status == 400
    assert responses_error(problem)["error"]["param"] == name


def test_a_misspelt_field_of_only_one_is_told_it() -> None:
    with pytest.raises(PagedError, match=r"is not allowed: expected include_obfuscation$"):
        read(stream=True, stream_options={"include_obfuscating": False})
