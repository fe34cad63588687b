from __future__ import annotations

import io
from typing import Any

import PIL.Image
import pytest

from paged_sdk import (
    InvalidRequestError,
    Message,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextMessages,
)
from paged_sdk.types.request import as_request


def call(function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


def test_messages_are_immutable() -> None:
    empty = TextMessages()
    one = empty.add_message(TextMessageRole.USER, "hi")
    assert empty.messages == ()
    assert one.messages == (Message(TextMessageRole.USER, "hi"),)
    assert one.add_message("assistant", "hello").messages[1].role is TextMessageRole.ASSISTANT


def test_every_form_of_request_means_the_same() -> None:
    expected = (Message(TextMessageRole.USER, "hi"),)
    forms: list[Any] = [
        TextMessages().add_message("user", "hi"),
        RequestBuilder().add_message("user", "hi"),
        RequestBuilder.from_messages([{"role": "user", "content": "hi"}]),
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        [Message(TextMessageRole.USER, "hi")],
    ]
    for form in forms:
        assert as_request(form).messages == expected
        assert as_request(form).options.sampling is None


@pytest.mark.parametrize(
    "bad",
    [
        [],
        TextMessages(),
        RequestBuilder(),
        "hi",
        {"role": "user", "content": "hi"},
        [{"role": "robot", "content": "hi"}],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        ["hi"],
        3,
    ],
)
def test_bad_messages_say_what_is_allowed(bad: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_request(bad)
    assert caught.value.field
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"role": "robot", "content": "hi"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": {}}}]},
            "messages[1].tool_calls.name",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}, "messages[1].image"),
        ({"role": "user", "content": "hi", "mood": 3}, "messages[1]['mood']"),
        ("hi", "messages[1]"),
    ],
)
def test_one_of_several_bad_messages_is_named_by_its_place(bad: Any, field: str) -> None:
    good = {"role": "user", "content": "hi"}
    for ask in (as_request, RequestBuilder.from_messages, TextMessages):
        with pytest.raises(InvalidRequestError) as caught:
            ask([good, bad, good])
        assert caught.value.field == field
        assert str(caught.value).startswith(field)
        assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"role": "user", "content": "a\ud800"}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "a\ud800"}]}, "content"),
        ({"role": "user", "content": "hi", "name": "a\ud800"}, "name"),
        ({"role": "tool", "content": "hi", "tool_call_id": "a\ud800"}, "tool_call_id"),
        ({"role": "assistant", "content": "hi", "reasoning_content": "a\ud800"}, "reasoning_content"),
        (call({"name": "a\ud800", "arguments": {}}), "tool_calls.name"),
        (call({"name": "a", "arguments": "\ud800"}), "tool_calls.arguments"),
        (call({"name": "a", "arguments": {"b": ["\ud800"]}}), "tool_calls.arguments"),
        (call({"name": "a", "arguments": {"\ud800": 1}}), "tool_calls.arguments"),
    ],
)
def test_a_lone_surrogate_in_a_message_is_refused_by_its_place(bad: Any, field: str) -> None:
    before = {"role": "user", "content": "hi"}
    with pytest.raises(InvalidRequestError, match="lone surrogates") as caught:
        as_request([before, bad])
    assert caught.value.field == f"messages[1].{field}"
    with pytest.raises(InvalidRequestError, match="lone surrogates") as caught:
        as_request([bad])
    assert caught.value.field == field


def test_an_image_that_cannot_be_read_is_named_by_its_place() -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 64)).save(file, "PNG")
    truncated = PIL.Image.open(io.BytesIO(file.getvalue()[:60]))
    bad = {"role": "user", "content": [{"type": "image", "image": truncated}]}
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.image: the image cannot be read: ") as caught:
        as_request([{"role": "user", "content": "hi"}, bad])
    assert caught.value.field == "messages[1].image"


def test_a_turn_of_the_models_may_hold_no_text() -> None:
    turns: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    assert as_request(turns).messages[1] == Message(TextMessageRole.ASSISTANT, "")
    for role in ("user", "system", "developer", "tool"):
        with pytest.raises(InvalidRequestError, match="content"):
            as_request([{"role": role, "content": None}])


def test_request_options() -> None:
    sampling = SamplingParams(temperature=0.5)
    request = (
        RequestBuilder()
        .add_message("user", "hi")
        .with_sampling(sampling)
        .with_logprobs(2)
        .with_priority(3)
        .with_timeout(1.5)
        .with_cache_salt("tenant")
        .with_truncation()
        .with_enable_thinking(False)
    )
    options = request.options
    assert options.sampling == SamplingParams(temperature=0.5, top_n_logprobs=2)
    assert (options.priority, options.timeout, options.cache_salt) == (3, 1.5, "tenant")
    assert options.truncation
    assert options.enable_thinking is False
    # Asking for logprobs alone leaves a request greedy.
    greedy = RequestBuilder().with_logprobs().options.sampling
    assert greedy is not None
    assert greedy.is_greedy


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "5", True, None, 10**400])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        RequestBuilder().with_timeout(timeout)


def test_logprobs_and_sampling_come_in_any_order() -> None:
    sampling = SamplingParams(temperature=0.5)
    for request in (
        RequestBuilder().with_logprobs(2).with_sampling(sampling),
        RequestBuilder().with_sampling(sampling).with_logprobs(2),
        RequestBuilder().with_logprobs(2).with_sampling(SamplingParams()).with_sampling(sampling),
    ):
        assert request.options.sampling == SamplingParams(temperature=0.5, top_n_logprobs=2)


def test_a_builder_takes_messages_of_any_form() -> None:
    built = RequestBuilder([{"role": "user", "content": "hi"}])
    assert built == RequestBuilder().add_message("user", "hi") == RequestBuilder(TextMessages(built.messages))
    assert Message("user", "hi").role is TextMessageRole.USER


def test_other_bad_options_are_refused() -> None:
    bad: Any = "high"
    with pytest.raises(InvalidRequestError, match="priority"):
        RequestBuilder().with_priority(bad)
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        RequestBuilder().with_cache_salt("")
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        RequestBuilder().with_cache_salt("\ud800")
    with pytest.raises(InvalidRequestError, match="enable_thinking"):
        RequestBuilder().with_enable_thinking(bad)
    with pytest.raises(InvalidRequestError, match="logprobs"):
        RequestBuilder().with_logprobs(bad)
    with pytest.raises(InvalidRequestError, match="sampling"):
        RequestBuilder().with_sampling(bad)


def test_a_builder_is_no_list_of_messages() -> None:
    """Its options would be lost."""
    with pytest.raises(InvalidRequestError):
        RequestBuilder(RequestBuilder().with_priority(3))  # type: ignore[arg-type]
