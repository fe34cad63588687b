"""Runs the tools for which a runner has callbacks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from attrs import evolve

import paged_sdk
from paged_sdk import BlockingChatStream, ConfigError, Message, ModelClosedError, RequestBuilder
from paged_sdk.mistralrs.responses import AgenticToolCallRecord
from paged_sdk.mistralrs.usage import summed

__all__ = ["MAX_ROUNDS", "Callbacks", "Rounds", "StreamedRounds", "checked_callbacks", "model_stays_loaded"]

MAX_ROUNDS: Final = 256
"""mistral.rs's default for how many rounds of tools a request may run."""

Callbacks: TypeAlias = Mapping[str, Callable[[str, dict[str, Any]], str]]


def checked_callbacks(callbacks: object) -> Callbacks:
    """Check the callbacks: a mapping from names of tools to functions.

    :raises ConfigError: they are something else
    """
    if callbacks is None:
        return {}
    if not isinstance(callbacks, Mapping) or not all(map(callable, callbacks.values())):
        raise ConfigError.of("tool_callbacks", callbacks, "functions of a name and arguments, by names of tools")
    return {**callbacks}


@contextmanager
def model_stays_loaded() -> Iterator[None]:
    """Replace the error's text if the model is unloaded during a request: the request does not continue on a reloaded
    model.

    :raises ModelClosedError: the model was unloaded, or the runner closed
    """
    try:
        yield
    except ModelClosedError as error:
        raise ModelClosedError(
            "the model was unloaded, or the runner closed, before this request had ended: send it again"
        ) from error


class Rounds:
    """Runs the tools that a model calls, in the thread that waits for the answer, and collects the results.

    An answer is the last one if it calls no tool, if it was canceled because the model was closed, if it calls a tool
    without a callback, which is left to the program, or if the maximum number of rounds has been run.

    :param request: the first request
    :param max_rounds: maximum number of rounds of tools
    :ivar request: the next request to send
    :ivar records: a record of each call that was run
    """

    def __init__(self, request: RequestBuilder, callbacks: Callbacks, max_rounds: int) -> None:
        self._callbacks: Final = callbacks
        self._max_rounds: Final = max_rounds
        self._responses: list[paged_sdk.ChatCompletionResponse] = []
        self.request: RequestBuilder = request
        self.records: list[AgenticToolCallRecord] = []

    def goes_on(self, response: paged_sdk.ChatCompletionResponse) -> bool:
        """Run the tools that an answer calls, and return whether :attr:`request` must be sent next."""
        self._responses.append(response)
        message = response.choices[0].message
        calls = message.tool_calls
        is_over = len(self._responses) > self._max_rounds or response.choices[0].finish_reason == "canceled"
        if is_over or not calls or any(call.function.name not in self._callbacks for call in calls):
            return False
        self.request = self.request.add_messages(message, *self._answers(calls))
        return True

    def whole(self) -> paged_sdk.ChatCompletionResponse:
        """Return the last answer, with the usage of all answers."""
        return evolve(self._responses[-1], usage=summed([response.usage for response in self._responses]))

    def _answers(self, calls: Sequence[paged_sdk.ToolCallResponse]) -> Iterator[Message]:
        for call in calls:
            name = call.function.name
            try:
                result = self._callbacks[name](name, call.function.parse_arguments())
            except Exception as error:  # raised by the program's function: reported to the model
                result = f"Error: {type(error).__name__}: {error}"
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            self.records.append(
                AgenticToolCallRecord(
                    round=len(self._responses) - 1,
                    name=name,
                    arguments=call.function.arguments,
                    result_content=text,
                )
            )
            # Lone surrogates, as in names of files, cannot be encoded as UTF-8, and so not tokenized.
            text = text.encode("utf-8", "backslashreplace").decode()
            yield Message("tool", text, name=name, tool_call_id=call.id)


class StreamedRounds:
    """Iterates over the chunks of all answers of one request, between which tools are run, as chunks of one response.

    Calls that are run here are left out of the chunks.

    :param send: sends a request
    """

    def __init__(self, send: Callable[[RequestBuilder], BlockingChatStream], rounds: Rounds) -> None:
        self._send: Final = send
        self._rounds: Final = rounds
        self._stream = send(rounds.request)
        self._calls: list[paged_sdk.ToolCallResponse] = []
        self._id: str | None = None
        self._lock: Final = threading.Lock()
        self._is_closed = False

    def __next__(self) -> paged_sdk.ChatCompletionChunkResponse:
        while True:
            with model_stays_loaded():
                chunk = next(self._stream)
            self._id = self._id or chunk.id
            self._calls += [call for choice in chunk.choices for call in choice.delta.tool_calls]
            is_last, goes_on = any(choice.finish_reason for choice in chunk.choices), False
            if is_last:
                goes_on = self._rounds.goes_on(self._stream.collect())
            calls = tuple(self._calls) if is_last and not goes_on else ()
            shown = tuple(_choice(choice, calls, goes_on=goes_on) for choice in chunk.choices)
            if goes_on:
                self._calls = []
                with self._lock:
                    if self._is_closed:  # closed by a tool, or by another thread while a tool ran
                        raise StopIteration
                    self._stream = self._send(self._rounds.request)
            if is_last and not goes_on:
                return evolve(chunk, id=self._id, choices=shown, usage=self._rounds.whole().usage)
            if any(choice.delta.content or choice.delta.reasoning_content or choice.logprobs for choice in shown):
                return evolve(chunk, id=self._id, choices=shown, usage=None)

    def response_so_far(self) -> paged_sdk.ChatCompletionResponse:
        """Return a response made of the chunks read so far of the current answer."""
        return self._stream.response_so_far()

    def close(self) -> None:
        """End the request if it has not ended."""
        with self._lock:
            self._is_closed = True
        self._stream.close()


def _choice(
    choice: paged_sdk.ChunkChoice, calls: tuple[paged_sdk.ToolCallResponse, ...], *, goes_on: bool
) -> paged_sdk.ChunkChoice:
    """Return the visible part of a chunk's choice.

    :param calls: calls that are left to the program
    :param goes_on: whether another answer follows
    """
    delta = evolve(choice.delta, tool_calls=calls, tool_call_deltas=())
    return evolve(choice, finish_reason=None if goes_on else choice.finish_reason, delta=delta)
