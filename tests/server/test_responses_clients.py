"""OpenAI's own client and its helpers for responses, as users have them, against a server of fake models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from paged_sdk import GgufModelBuilder, NumericalError, embedded_model_path
from paged_sdk.testing import FakeModel, FakeRequest, fake_model
from serving import Serving, serving

CALL: Final = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tell the weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def reply(request: FakeRequest) -> str:
    last = request.messages[-1]
    if request.options.shown_tools and last.role.value == "user":
        return last.content if "<tool_call>" in last.content else CALL
    return last.content.upper()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model(reply)) as served:
        yield served


def events_of(served: Serving, **body: Any) -> list[dict[str, Any]]:
    text = served.post("/v1/responses", stream=True, **body).text
    found = [event.split("\n", 1) for event in text.strip().split("\n\n")]
    named = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
    assert all(name == data["type"] for name, data in named)
    events = [data for _, data in named]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(output: Any) -> Any:
    return [{**item, "id": "", "call_id": ""} for item in output]


def test_a_response(served: Serving) -> None:
    response = served.openai.responses.create(
        model="fake", input="héllo ☃", instructions="Be loud.", metadata={"a": "b"}, temperature=0.5
    )
    assert response.output_text == "HÉLLO ☃"
    assert (response.status, response.model, response.instructions) == ("completed", "fake", "Be loud.")
    assert (response.metadata, response.temperature, response.error) == ({"a": "b"}, 0.5, None)
    Response.model_validate(response.to_dict())  # clients do not check what they read
    assert response.usage is not None
    assert response.usage.output_tokens == len("HÉLLO ☃".encode()) + 1
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    again = served.openai.responses.create(model="fake", input="héllo ☃", instructions="Be loud.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.usage.input_tokens == response.usage.input_tokens
    assert (again.temperature, again.top_p) == (1.0, 1.0)


def test_a_response_that_is_cut_off(served: Serving) -> None:
    response = served.openai.responses.create(model="fake", input="hello", max_output_tokens=2)
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason, response.output_text) == (
        "incomplete",
        "max_output_tokens",
        "HE",
    )
    last = events_of(served, input="hello", max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_the_events_of_a_text(served: Serving) -> None:
    events = events_of(served, input="hi")
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in events[4 : 4 + deltas]) == "HI"
    whole = served.post("/v1/responses", input="hi").json()
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert events[-1]["response"].keys() == events[0]["response"].keys() == whole.keys()


def test_the_helpers_join_the_stream(served: Serving) -> None:
    with served.openai.responses.stream(model="fake", input="hello") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert snapshots[-1] == response.output_text == "HELLO"


def test_logprobs_come_with_texts(served: Serving) -> None:
    fields: dict[str, Any] = {"input": "hé", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = served.post("/v1/responses", **fields).json()["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for token in whole for byte in token["bytes"]) == "HÉ".encode()
    assert {len(token["top_logprobs"]) for token in whole} == {2}
    events = events_of(served, **fields)
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == whole
    assert any(event["logprobs"] for event in events if event["type"] == "response.output_text.delta")


def test_functions_are_called_and_answered(served: Serving) -> None:
    response = served.openai.responses.create(model="fake", input="weather?", tools=TOOLS)
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (response.status, call.name, json.loads(call.arguments)) == ("completed", "weather", {"city": "Oslo"})
    Response.model_validate(response.to_dict())
    conversation: Any = [
        {"role": "user", "content": "weather?"},
        *response.output,  # as the client has it
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    after = served.openai.responses.create(model="fake", input=conversation, tools=TOOLS)
    assert after.output_text == "RAIN"
    third: Any = [*conversation, *after.output, {"role": "user", "content": "bye"}]
    assert served.openai.responses.create(model="fake", input=third).output_text == "BYE"


def test_calls_of_functions_are_streamed(served: Serving) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}"
    with served.openai.responses.stream(model="fake", input=text, tools=TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == '{"city": "Oslo"}' * 2
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    whole = served.post("/v1/responses", input=text, tools=TOOLS).json()
    raw = events_of(served, input=text, tools=TOOLS)
    done = [event["item"] for event in raw if event["type"] == "response.output_item.done"]
    assert without_ids(done) == without_ids(whole["output"]) == without_ids(raw[-1]["response"]["output"])
    one = served.openai.responses.create(model="fake", input=text, tools=TOOLS, parallel_tool_calls=False)
    streamed = events_of(served, input=text, tools=TOOLS, parallel_tool_calls=False)[-1]["response"]["output"]
    assert [item.type for item in one.output] == [item["type"] for item in streamed] == ["message", "function_call"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_items_can_be_sent_again_with_every_field_that_the_client_has(served: Serving, is_streamed: bool) -> None:
    asked: Any = {"model": "fake", "input": f"Let me see.\n{CALL}", "tools": TOOLS}
    if is_streamed:
        with served.openai.responses.stream(**asked) as stream:
            output = stream.get_final_response().output
    else:
        output = served.openai.responses.parse(**asked).output
    dumped: Any = [item.model_dump() for item in output]
    assert [item["type"] for item in dumped] == ["message", "function_call"]
    result = {"type": "function_call_output", "call_id": dumped[1]["call_id"], "output": "rain"}
    after = served.openai.responses.create(**asked | {"input": [{"role": "user", "content": "?"}, *dumped, result]})
    assert after.output_text == "RAIN"


def test_a_call_that_is_cut_off_is_incomplete(served: Serving) -> None:
    events = events_of(served, input="weather?", tools=TOOLS, max_output_tokens=len(CALL) - 20)
    calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert events[-1]["type"] == "response.incomplete"
    assert [call["status"] for call in calls] == ["incomplete"]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (len("</tool_ca"), [("message", "completed"), ("function_call", "completed"), ("message", "incomplete")]),
        (len("}}</tool_call>"), [("message", "completed"), ("function_call", "completed"), ("message", "incomplete")]),
        (len(CALL) + 1, [("message", "completed"), ("function_call", "completed")]),
    ],
)
def test_only_what_was_cut_off_is_incomplete(served: Serving, cut: int, expected: list[tuple[str, str]]) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}"
    asked: dict[str, Any] = {"input": text, "tools": TOOLS, "max_output_tokens": len(text) - cut}
    whole, last = served.post("/v1/responses", **asked).json(), events_of(served, **asked)[-1]["response"]
    assert whole["status"] == last["status"] == "incomplete"
    assert without_ids(whole["output"]) == without_ids(last["output"])
    kinds = [(item["type"], item["status"]) for item in whole["output"]]
    assert [kind for kind in kinds if kind != ("function_call", "incomplete")] == expected
    assert whole["output"][1]["arguments"] == '{"city": "Oslo"}'
    assert all(CALL.startswith(item["content"][0]["text"].strip()) for item in whole["output"][2:] if "content" in item)


def test_thoughts_are_items_of_their_own() -> None:
    with serving(fake_model("<think>Hm.</think>Yes.")) as served:
        whole = served.openai.responses.create(model="fake", input="?")
        events = events_of(served, input="?")
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        Response.model_validate(whole.to_dict())
        assert whole.output_text == "Yes."
        assert whole.usage is not None
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(thoughts) == "Hm."
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]
        again: Any = [{"role": "user", "content": "?"}, *whole.output, {"role": "user", "content": "Sure?"}]
        served.openai.responses.create(model="fake", input=again)
        model = served.model
        assert isinstance(model, FakeModel)
        assert model.requests[-1].messages[1].reasoning_content == "Hm."
        with served.openai.responses.stream(model="fake", input="?") as stream:
            assert stream.get_final_response().output_text == "Yes."


def test_thoughts_are_a_summary_where_one_is_asked_for() -> None:
    """Clients show summaries alone: OpenAI's models give nothing else."""
    with serving(fake_model("<think>Hm.</think>Yes.")) as served:
        fields: dict[str, Any] = {"input": "?", "reasoning": {"summary": "auto"}}
        whole = served.openai.responses.create(model="fake", **fields)
        events = events_of(served, **fields)
        with served.openai.responses.stream(model="fake", **fields) as stream:
            final = stream.get_final_response()
        again: Any = [{"role": "user", "content": "?"}, *whole.output, {"role": "user", "content": "Sure?"}]
        served.openai.responses.create(model="fake", input=again)
        model = served.model
        assert isinstance(model, FakeModel)
        assert model.requests[-1].messages[1].reasoning_content == "Hm."
    for response in (whole, final):
        thought = response.output[0]
        assert isinstance(thought, ResponseReasoningItem)
        assert ([part.text for part in thought.summary], thought.content) == (["Hm."], [])
    assert whole.reasoning is not None
    assert whole.reasoning.summary == "auto"
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("reasoning_summary_text.delta")
    assert names[2 : deltas + 7] == [
        *("output_item.added", "reasoning_summary_part.added"),
        *["reasoning_summary_text.delta"] * deltas,
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole.to_dict()["output"])


def test_tokens_are_counted(served: Serving) -> None:
    fields: dict[str, Any] = {"model": "fake", "input": "hi", "instructions": "Be loud.", "tools": TOOLS}
    counted = served.openai.responses.input_tokens.count(**fields)
    response = served.openai.responses.create(**fields)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


class Place(BaseModel):
    name: str


def test_answers_are_parsed_as_types() -> None:
    with serving(fake_model('{"name": "Oslo"}')) as served:
        parsed = served.openai.responses.parse(model="fake", input="where?", text_format=Place)
        assert parsed.output_parsed == Place(name="Oslo")
        with served.openai.responses.stream(model="fake", input="where?", text_format=Place) as stream:
            assert stream.get_final_response().output_parsed == Place(name="Oslo")
        model = served.model
        assert isinstance(model, FakeModel)
        assert [request.options.constraint is not None for request in model.requests] == [True, True]


def test_the_asynchronous_client(served: Serving) -> None:
    async def main() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model="fake", input="hi")
            async with client.responses.stream(model="fake", input="hi") as stream:
                final = await stream.get_final_response()
            return whole.output_text, final.output_text

    assert asyncio.run(main()) == ("HI", "HI")


def test_errors_name_the_fields_of_this_api(served: Serving) -> None:
    bad: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.responses.create(model="fake", input="hi", text=bad)
    assert caught.value.param == "text.format"
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.responses.create(model="fake", input="hi", store=True)
    assert caught.value.param == "store"


def test_a_failure_within_a_stream_is_an_event() -> None:
    with serving(fake_model("ab", error=NumericalError("NaN"))) as served:
        events = events_of(served, input="hi")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "NaN" in events[-1]["response"]["error"]["message"]


def test_a_failure_before_the_first_token_of_a_stream_that_was_kept_alive_is_an_event() -> None:
    """There is no status to say it by any more, and OpenAI's client takes no event before the first one."""
    model = fake_model("", delay=0.1, error=NumericalError("NaN"))
    with serving(model, keep_alive=0.01) as served, served.openai.responses.stream(model="fake", input="hi") as stream:
        events = list(stream)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event.sequence_number for event in events] == [0, 1, 2]


def test_a_real_model() -> None:
    with serving({"small": GgufModelBuilder(embedded_model_path()).build}) as served:
        fields: dict[str, Any] = {"model": "small", "input": "Explain gravity in one sentence.", "temperature": 0}
        with served.openai.responses.stream(**fields, max_output_tokens=64) as stream:
            streamed = stream.get_final_response()
        whole = served.openai.responses.create(**fields, max_output_tokens=64)
    assert "Gravity" in whole.output_text
    assert streamed.output_text == whole.output_text
