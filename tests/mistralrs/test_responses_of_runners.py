"""Responses have mistral.rs's attributes, streamed ones too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve

from paged_sdk import BlockingModel, mistralrs
from paged_sdk.mistralrs import (
    ChatCompletionRequest,
    ChatCompletionStream,
    CompletionRequest,
    Runner,
    ToolCallType,
    Which,
)
from paged_sdk.mistralrs.answers import Answers
from paged_sdk.mistralrs.generations import AdapterLimits, Generations
from paged_sdk.mistralrs.residence import Residence
from paged_sdk.testing import fake_model

WEATHER = json.dumps({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
ASKS: ChatCompletionRequest[Literal[False]] = ChatCompletionRequest("Hello!", "default", tool_schemas=[WEATHER])
STREAMS: ChatCompletionRequest[Literal[True]] = ChatCompletionRequest(
    "Hello!", "default", tool_schemas=[WEATHER], stream=True
)


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> Iterator[Runner]:
    with Runner(Which.Plain(str(tiny_checkpoint), dtype="float32"), pa_ctxt_len=2048) as runner:
        yield runner


def runner_of(*texts: Any, callbacks: Any = None) -> Runner:
    """Return a runner whose model says these texts."""
    runner = Runner.__new__(Runner)
    runner._which = Which.Plain("fake")
    runner._generations = Generations({}, AdapterLimits())
    runner._residence = Residence(lambda: BlockingModel(fake_model(*texts)))
    runner._answers = Answers(runner._residence.model, runner._generations, callbacks or {}, seed=None)
    return runner


def test_a_whole_response(runner: Runner) -> None:
    request: ChatCompletionRequest[Literal[False]] = ChatCompletionRequest(
        "Hello!", "default", max_tokens=3, logprobs=True, top_logprobs=2
    )
    response = runner.send_chat_completion_request(request)
    assert (response.agentic_tool_calls, response.adapter_generation, response.files) == (None, None, None)
    (choice,) = response.choices
    assert (choice.message.role, choice.message.tool_calls, choice.message.reasoning_content) == (
        "assistant",
        None,
        None,
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert isinstance(first, mistralrs.ResponseLogprob)
    assert bytes(first.bytes or []).decode(errors="replace") == first.token
    best = first.top_logprobs[0]
    assert (best.bytes, best.logprob) == (first.token, first.logprob)
    assert runner.detokenize_text([best.token], False) == first.token
    assert response.to_dict()["choices"][0]["message"]["content"] == choice.message.content
    assert json.loads(response.to_json()) == response.to_dict()
    completion = runner.send_completion_request(CompletionRequest("Once", "default", max_tokens=3, echo_prompt=True))
    assert completion.choices[0].text.startswith("Once")
    assert completion.to_dict()["choices"][0]["text"] == completion.choices[0].text
    assert json.loads(completion.to_json()) == completion.to_dict()


def test_chunks_have_the_logprobs_of_one_token_each(runner: Runner) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "logprobs": True, "n_choices": 2, "temperature": 1.0}
    with Runner(Which.Plain(runner.list_models()[0], dtype="float32"), seed=3) as seeded:
        whole = seeded.send_chat_completion_request(ChatCompletionRequest("Hello!", "default", **fields))
        stream = seeded.send_chat_completion_request(ChatCompletionRequest("Hello!", "default", stream=True, **fields))
        assert isinstance(stream, ChatCompletionStream)
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert choice.logprobs is not None
        assert [each.logprobs for each in own if each.logprobs is not None] == choice.logprobs.content
        assert [each.finish_reason for each in own if each.finish_reason] == [choice.finish_reason]
        assert own[-1].finish_reason


def test_the_stop_sequence_is_said() -> None:
    for is_streamed in (False, True):
        with runner_of("One, two, three.") as runner:
            request: ChatCompletionRequest[bool] = ChatCompletionRequest(
                "Count!", "default", stop_seqs=["four", ", three"], stream=is_streamed
            )
            answer = runner.send_chat_completion_request(request)
            if isinstance(answer, ChatCompletionStream):
                chunks = list(answer)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "One, two"
                assert all(chunk.choices[0].stop_sequence is None for chunk in chunks[:-1])
                assert chunks[-1].choices[0].stop_sequence == ", three"
            else:
                assert answer.choices[0].message.content == "One, two"
                assert answer.choices[0].stop_sequence == ", three"
            (other,) = runner.send_chat_completion_request(ChatCompletionRequest("Count!", "default")).choices
            assert other.stop_sequence is None


def test_calls_that_the_program_does(runner: Runner) -> None:
    with runner_of(CALL) as fake:
        (choice,) = fake.send_chat_completion_request(ASKS).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert (call.index, call.tp, call.function.name) == (0, ToolCallType.Function, "weather")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        chunks = list(fake.send_chat_completion_request(STREAMS))
        calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        assert [each.function for each in calls] == [call.function]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_that_callbacks_do_are_recorded() -> None:
    with runner_of("Let me see." + CALL, CALL, "It is warm.", callbacks={"weather": lambda *_: "20 degrees"}) as runner:
        response = runner.send_chat_completion_request(ASKS)
    assert response.choices[0].message.content == "It is warm."
    assert response.agentic_tool_calls is not None
    assert [(each.round, each.name, each.result_content) for each in response.agentic_tool_calls] == [
        (0, "weather", "20 degrees"),
        (1, "weather", "20 degrees"),
    ]
    assert json.loads(response.agentic_tool_calls[0].arguments) == {"city": "Paris"}


def test_callbacks_do_tools_while_a_response_is_streamed() -> None:
    told: list[Any] = []

    def callback(name: str, arguments: dict[str, Any]) -> Any:
        told.append((name, arguments))
        if len(told) == 2:
            raise OSError("no station")
        return {"degrees": 20}

    with runner_of("Let me see." + CALL, CALL, "It is warm.", callbacks={"weather": callback}) as runner:
        chunks = list(runner.send_chat_completion_request(STREAMS))
        assert told == [("weather", {"city": "Paris"})] * 2
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "Let me see.It is warm."
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert [chunk for chunk in chunks if chunk.usage is not None] == chunks[-1:]
    with runner_of(CALL, callbacks={"weather": callback}) as runner:
        (last,) = runner.send_chat_completion_request(evolve(STREAMS, max_tool_rounds=2))
        assert last.choices[0].finish_reason == "tool_calls"
        assert [call.function.name for call in last.choices[0].delta.tool_calls or []] == ["weather"]
        with runner.send_chat_completion_request(evolve(STREAMS, max_tool_rounds=9)) as stream:
            stream.close()
        assert next(stream, None) is None


@pytest.mark.parametrize("request_", [ASKS, STREAMS])
def test_the_model_is_told_what_a_callback_returns_or_raises(request_: ChatCompletionRequest[bool]) -> None:
    def fails(name: str, arguments: dict[str, Any]) -> str:
        raise OSError("no station")

    for callback, told in ((fails, "Error: OSError: no station"), (lambda *_: "20 degrees", "20 degrees")):
        with runner_of(CALL, lambda seen: str(seen.messages[-1].content), callbacks={"weather": callback}) as runner:
            answer = runner.send_chat_completion_request(request_)
            if isinstance(answer, ChatCompletionStream):
                assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == told
            else:
                assert answer.choices[0].message.content == told


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_without_a_callback_are_for_the_program(is_streamed: bool) -> None:
    other = CALL.replace("weather", "time")
    schemas = [WEATHER, WEATHER.replace("weather", "time")]
    with runner_of(CALL, f"Now: {CALL}{other}", callbacks={"weather": lambda *_: "20 degrees"}) as runner:
        request: ChatCompletionRequest[bool] = ChatCompletionRequest(
            "Hello!", "default", tool_schemas=schemas, stream=is_streamed
        )
        answer = runner.send_chat_completion_request(request)
        if isinstance(answer, ChatCompletionStream):
            chunks = list(answer)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == "Now:"
            calls, usage = chunks[-1].choices[0].delta.tool_calls, chunks[-1].usage
        else:
            calls, usage = answer.choices[0].message.tool_calls, answer.usage
            assert [each.round for each in answer.agentic_tool_calls or []] == [0]
            assert answer.to_dict()["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
        assert [call.function.name for call in calls or []] == ["weather", "time"]
    with runner_of(CALL, f"Now: {CALL}{other}") as runner:
        alone = runner.send_chat_completion_request(ChatCompletionRequest("Hello!", "default", tool_schemas=schemas))
    assert usage is not None
    assert usage.prompt_tokens > 2 * alone.usage.prompt_tokens  # of both answers, the second of which has more of it
    assert usage.completion_tokens > alone.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.avg_prompt_tok_per_sec == pytest.approx(usage.prompt_tokens / usage.total_prompt_time_sec)
