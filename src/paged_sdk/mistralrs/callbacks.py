"""Run the tools that a runner has callbacks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from attrs import evolve

import paged_sdk
from paged_sdk import BlockingChatStream, ConfigError, Message, RequestBuilder, ToolRoundsError, ToolRun
from paged_sdk.mistralrs.responses import AgenticToolCallRecord

__all__ = ["Callbacks", "StreamedRounds", "checked_callbacks", "records_of"]

Callbacks: TypeAlias = Mapping[str, Callable[[str, dict[str, Any]], str]]


def checked_callbacks(callbacks: object) -> Callbacks:
    """Return functions by names of tools.

    :raises ConfigError: they are something else
    """
    if callbacks is None:
        return {}
    if not isinstance(callbacks, Mapping) or not all(map(callable, callbacks.values())):
        raise ConfigError.of("tool_callbacks", callbacks, "functions of a name and arguments, by names of tools")
    return {**callbacks}


def records_of(run: ToolRun) -> Iterator[AgenticToolCallRecord]:
    """Return what was called for an answer, in order."""
    told = {message.tool_call_id: message.content for message in run.messages}
    for place, response in enumerate(run.responses):
        for call in response.choices[0].message.tool_calls:
            yield AgenticToolCallRecord(
                round=place,
                name=call.function.name,
                arguments=call.function.arguments,
                result_content=told[call.id],
            )


class StreamedRounds:
    """Gives the chunks of all answers of a model that calls tools until it has the last one, as those of one response.

    The calls themselves are not among them: they are done while the next chunk is waited for.

    :param send: sends a request
    :param request: the first one
    :param callbacks: do its tools
    :param max_rounds: how often tools are run at most
    """

    def __init__(
        self,
        send: Callable[[RequestBuilder], BlockingChatStream],
        request: RequestBuilder,
        callbacks: Callbacks,
        max_rounds: int,
    ) -> None:
        self._send: Final = send
        self._request = request
        self._callbacks: Final = callbacks
        self._max_rounds: Final = max_rounds
        self._responses: list[paged_sdk.ChatCompletionResponse] = []
        self._stream = send(request)
        self._id: str | None = None

    def __next__(self) -> paged_sdk.ChatCompletionChunkResponse:
        while True:
            chunk = next(self._stream)
            self._id = self._id or chunk.id
            is_called = any(choice.finish_reason == "tool_calls" for choice in chunk.choices)
            if is_called:
                self._go_on(self._stream.collect())
            shown = tuple(_without_calls(choice) for choice in chunk.choices)
            if not is_called:
                return evolve(chunk, id=self._id, choices=shown)
            if any(choice.delta.content or choice.delta.reasoning_content for choice in shown):
                return evolve(chunk, id=self._id, choices=shown, usage=None)

    def close(self) -> None:
        """End the request if it has not ended."""
        self._stream.close()

    def _go_on(self, response: paged_sdk.ChatCompletionResponse) -> None:
        """Do what a response calls, and send what came of it."""
        self._responses.append(response)
        if len(self._responses) > self._max_rounds:
            raise ToolRoundsError(
                f"the model called tools again after {self._max_rounds} rounds of calls",
                request_id=response.id,
                partial_response=response,
                max_rounds=self._max_rounds,
                responses=self._responses,
            )
        message = response.choices[0].message
        self._request = self._request.add_messages(message, *self._answers(message.tool_calls))
        self._stream = self._send(self._request)

    def _answers(self, calls: Sequence[paged_sdk.ToolCallResponse]) -> Iterable[Message]:
        for call in calls:
            name = call.function.name
            try:
                result = self._callbacks[name](name, call.function.parse_arguments())
            except Exception as error:  # of the program's own: the model is told, as where nothing is streamed
                result = f"Error: {type(error).__name__}: {error}"
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            yield Message("tool", text, name=name, tool_call_id=call.id)


def _without_calls(choice: paged_sdk.ChunkChoice) -> paged_sdk.ChunkChoice:
    """Return what is shown of a chunk whose calls are done here."""
    reason = None if choice.finish_reason == "tool_calls" else choice.finish_reason
    delta = evolve(choice.delta, tool_calls=(), tool_call_deltas=())
    return evolve(choice, finish_reason=reason, delta=delta)
