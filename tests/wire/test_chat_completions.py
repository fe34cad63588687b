"""Every field of OpenAI's chat completions is honoured, or asks for nothing, or is refused by its name."""

from __future__ import annotations

import typing
from typing import Any, Final

import pytest
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from paged_sdk import InvalidRequestError, PagedError, RequestBuilder, SamplingParams
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.wire.chat_completions import CHAT_COMPLETION, read_chat_completion
from paged_sdk.wire.completions import COMPLETION, read_completion
from paged_sdk.wire.embeddings import EMBEDDING
from paged_sdk.wire.problem import problem_of

HI: Final[dict[str, Any]] = {"model": "m", "messages": [{"role": "user", "content": "Hi!"}]}
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "f", "parameters": {}}}


def sampled(**fields: Any) -> SamplingParams:
    sampling = read_chat_completion({**HI, **fields}).request.options.sampling
    assert sampling is not None
    return sampling


@pytest.mark.parametrize(
    ("reader", "params"),
    [
        (CHAT_COMPLETION, chat_create_params.CompletionCreateParamsBase),
        (COMPLETION, completion_create_params.CompletionCreateParamsBase),
        (EMBEDDING, EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_client_is_known(reader: Any, params: Any) -> None:
    assert typing.get_type_hints(params).keys() <= {*reader.names}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0.5, {"temperature": 0.5}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("top_k", 3, {"top_k": 3}),
        ("min_p", 0.1, {"min_p": 0.1}),
        ("frequency_penalty", 1, {"frequency_penalty": 1.0}),
        ("presence_penalty", -1, {"presence_penalty": -1.0}),
        ("repetition_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("max_tokens", 7, {"max_len": 7}),
        ("max_completion_tokens", 7, {"max_len": 7}),
        ("stop", "a", {"stop": ("a",)}),
        ("stop", ["a", "b"], {"stop": ("a", "b")}),
        ("stop_token_ids", [1], {"stop_token_ids": (1,)}),
        ("min_tokens", 2, {"min_tokens": 2}),
        ("ignore_eos", True, {"ignore_eos": True}),
        ("logit_bias", {"5": -100}, {"logits_bias": {5: -100.0}}),
        ("n", 3, {"n_choices": 3}),
        ("logprobs", True, {"top_n_logprobs": 0}),
        ("seed", 5, {"seed": 5}),
        ("seed", -1, {"seed": 2**64 - 1}),
        ("prompt_logprobs", 1, {"prompt_logprobs": 1}),
    ],
)
def test_sampling_is_passed_on(field: str, value: Any, expected: dict[str, Any]) -> None:
    assert sampled(**{field: value}) == SamplingParams(**expected)
    assert sampled(**{field: None}) == SamplingParams()


def test_dry_is_passed_on() -> None:
    dry = sampled(dry_multiplier=1, dry_base=2, dry_allowed_length=3, dry_sequence_breakers=["x"]).dry_params
    assert dry is not None
    assert (dry.multiplier, dry.base, dry.allowed_length, dry.sequence_breakers) == (1, 2, 3, ("x",))


def with_options(**fields: Any) -> Any:
    return read_chat_completion({**HI, **fields}).request.options


def test_options_are_passed_on() -> None:
    assert with_options(prediction={"type": "content", "content": "abc"}).prediction == "abc"
    assert with_options(cache_salt="s").cache_salt == "s"
    assert with_options(truncate_sequence=True).truncation
    assert with_options(reasoning_effort="low").reasoning_effort == "low"
    assert with_options(reasoning_effort="none").enable_thinking is False
    assert with_options(enable_thinking=True).enable_thinking is True
    assert with_options(thinking_budget=9).thinking_budget == 9
    assert not with_options(add_generation_prompt=True).continue_final_message
    assert with_options(continue_final_message=True).continue_final_message
    assert with_options(continue_final_message=True, add_generation_prompt=False).continue_final_message
    assert with_options(chat_template_kwargs={"enable_thinking": False}).enable_thinking is False
    assert with_options(tools=[TOOL]).tool_choice == "auto"
    named = {"type": "function", "function": {"name": "f"}}
    assert [tool.name for tool in with_options(tools=[TOOL], tool_choice=named).forced_tools] == ["f"]
    assert with_options(response_format={"type": "text"}).constraint is None
    assert with_options(response_format={"type": "json_object"}).constraint.kind == "json_schema"
    schema = {"name": "a", "schema": {"type": "integer"}, "strict": False}
    assert with_options(response_format={"type": "json_schema", "json_schema": schema}).constraint.source == (
        '{"type": "integer"}'
    )
    assert with_options(grammar={"type": "regex", "value": "a+"}).constraint.kind == "regex"
    assert with_options(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"}).constraint
    either = with_options(tools=[TOOL], response_format={"type": "json_object"})
    assert either.answer_form is AnswerForm.CALLS_OR_JSON
    forced = with_options(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert (len(forced.forced_tools), forced.constraint) == (1, None)


def test_labels_and_the_stream_are_read() -> None:
    call = read_chat_completion({**HI, "user": "u", "stream": True, "stream_options": {"include_usage": True}})
    assert (call.label, call.is_streamed, call.includes_usage, call.model) == ("u", True, True, "m")
    assert read_chat_completion({**HI, "safety_identifier": "s", "user": "u"}).label == "s"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium"},
        {"audio": None, "functions": None, "web_search_options": None, "metadata": None, "moderation": None},
        {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory", "prompt_cache_options": {"mode": "implicit"}},
        {"parallel_tool_calls": True, "stream_options": None, "response_format": None, "tool_choice": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    plain = RequestBuilder.from_messages(HI["messages"]).with_sampling(SamplingParams())
    assert read_chat_completion({**HI, **fields}).request == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"modalities": ["text", "audio"]},
        {"verbosity": "low"},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"web_search_options": {}},
        {"metadata": {"a": "b"}},
        {"moderation": {"model": "m"}},
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_retention": "24h"},
        {"tools": [{"type": "custom", "custom": {"name": "c"}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}, "tools": [TOOL]},
        {"tools": [TOOL], "grammar": {"type": "regex", "value": "a"}},
        {"response_format": {"type": "json_object"}, "grammar": {"type": "regex", "value": "a"}},
        {"grammar": {"type": "regex", "value": {}}},
        {"stream": True, "prompt_logprobs": 1},
        {"reasoning_effort": "none", "enable_thinking": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"dry_base": 2},
        {"user": 5},
        {"seed": 2**63},
        {"logit_bias": {"+1": 1}},
        {"logit_bias": {str(token): 1 for token in range(65_537)}},
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(PagedError) as caught:
        read_chat_completion({**HI, **fields})
    problem = problem_of(caught.value)
    assert problem.status == 400
    assert (problem.param or "").split(".")[0].split("[")[0] in fields


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temprature", "temperature, or one of the other fields top_p, "),
        ("max_token", "max_tokens, or one of the other fields temperature, "),
        ("x" * 1_000_000, "one of the fields temperature, "),
    ],
)
def test_a_misspelt_field_is_told_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_chat_completion({**HI, name: 1})
    assert f"{name[:100]} = 1 is not allowed: expected {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "best"}}, "detail"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image"),
        ({"type": "text", "text": "a", "cache_control": {}}, "cache_control.type"),
        ({"type": "text", "text": "a", "citations": []}, "citations"),
        ({"type": "input_audio", "input_audio": {}}, "type"),
    ],
)
def test_parts_of_messages_are_checked(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_chat_completion({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize(("key", "value"), [("role", "robot"), ("content", 3), ("name", 3)])
def test_one_of_several_messages_is_named_by_its_place(key: str, value: Any) -> None:
    messages = [*HI["messages"], {"role": "user", "content": "x", key: value}]
    with pytest.raises(InvalidRequestError) as caught:
        read_chat_completion({**HI, "messages": messages})
    problem = problem_of(caught.value)
    assert problem.param == f"messages[1].{key}"
    assert problem.message.startswith(f"messages[1].{key} = ")


def test_images_are_data() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}}
    call = read_chat_completion({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert [image.data for image in call.request.messages[0].images] == [b"\0\0\0"]


def test_hints_that_frameworks_send_by_themselves_change_nothing() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    parts = [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]
    read = read_chat_completion({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert read.request == read_chat_completion({"model": "m", "messages": [{"role": "user", "content": "ab"}]}).request
    schema = {"name": "a", "schema": {"type": "integer"}}
    forms = [{"type": "json_schema", "json_schema": schema | more} for more in ({}, {"description": "d"})]
    assert with_options(response_format=forms[0]) == with_options(response_format=forms[1])


@pytest.mark.parametrize("more", [{}, {"reasoning_content": None}, {"reasoning_content": "Hm."}])
def test_reasoning_comes_back_under_either_name(more: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "Hm.", **more}]
    read = read_chat_completion({"model": "m", "messages": turns})
    assert read.request.messages[1].reasoning_content == "Hm."
    for wrong in ({"reasoning_content": "Oh."}, {"reasoning": {"effort": "low"}}):
        with pytest.raises(InvalidRequestError, match="reasoning"):
            read_chat_completion({"model": "m", "messages": [turns[0], turns[1] | wrong]})


def test_completions_are_read() -> None:
    call = read_completion({"model": "m", "prompt": ["a", "b"], "logprobs": 2, "user": "u", "cache_salt": "s"})
    assert call.sampling == SamplingParams(max_len=16, top_n_logprobs=2)
    assert call.options["cache_salt"] == "s"
    assert call.label == "u"
    assert read_completion({"model": "m", "prompt": [1, 2], "max_tokens": 3}).sampling.max_len == 3
    for bad in ({"best_of": 2}, {"suffix": "s"}, {"echo": True, "prompt": [1]}):
        with pytest.raises(InvalidRequestError) as caught:
            read_completion({"model": "m", "prompt": "a", **bad})
        assert caught.value.field in bad
    with pytest.raises(InvalidRequestError):
        read_completion({"model": "m", "prompt": "a", "grammar": {"type": "regex", "value": ""}})
