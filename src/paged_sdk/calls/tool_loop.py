"""Lets a model call tools until it answers without a call."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from datetime import date, time
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
import attrs
from attrs import frozen

from paged_sdk.errors import InvalidRequestError, ToolError, ToolRoundsError, shown
from paged_sdk.system.threads import in_anyio_thread
from paged_sdk.types.function_arguments import bind_arguments
from paged_sdk.types.messages import Message
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.response import ChatCompletionResponse, ToolCallResponse
from paged_sdk.types.tool import Tool

__all__ = ["OnToolError", "ToolRun", "check_tool_limits", "run_tools"]

OnToolError: TypeAlias = Literal["tell", "raise"]
"""What happens if a tool raises: the model is told, or the run ends."""


@frozen(kw_only=True)
class ToolRun:
    """Holds the result of a request whose tools were run.

    :ivar responses: the model's response in each round; the last one has no calls to run, unless the model was closed:
        then its finish reason is "canceled", and its calls were not run
    :ivar messages: the turns after those of the request: calls, tool results, and the answer
    """

    responses: tuple[ChatCompletionResponse, ...]
    messages: tuple[Message, ...]

    @property
    def response(self) -> ChatCompletionResponse:
        """Return the answer."""
        return self.responses[-1]


async def run_tools(
    send: Callable[[RequestBuilder], Awaitable[ChatCompletionResponse]],
    request: RequestBuilder,
    *,
    max_rounds: int,
    on_error: OnToolError,
    tool_timeout: float | None = None,
) -> ToolRun:
    """Send a request, run the tools that are called and send their results, until an answer calls none.

    If the request requires a call, only its first answer has to make one: otherwise no answer would ever be without a
    call.

    :raises InvalidRequestError: a tool without a function, several choices, or an argument that cannot be used
    :raises ToolError: a tool raised an exception, and ``on_error`` is "raise"
    :raises ToolRoundsError: tools were called once more after ``max_rounds`` rounds
    """
    check_tool_limits(max_rounds, tool_timeout)
    _check(request, on_error)
    seconds = None if tool_timeout is None else float(tool_timeout)
    tools = {tool.name: tool for tool in request.options.shown_tools}
    responses: list[ChatCompletionResponse] = []
    messages: list[Message] = []
    while True:
        response = await send(request.add_messages(*messages))
        responses.append(response)
        message = response.choices[0].message
        messages.append(Message.parse(message))
        if not message.tool_calls or response.choices[0].finish_reason == "canceled":  # the model was closed
            return ToolRun(responses=tuple(responses), messages=tuple(messages))
        if len(responses) > max_rounds:
            raise ToolRoundsError(
                f"the model called tools again after {max_rounds} rounds of calls",
                request_id=response.id,
                partial_response=response,
                max_rounds=max_rounds,
                responses=responses,
            )
        messages += await _answers(message.tool_calls, tools, response, on_error, seconds)
        request = request.with_tools(request.options.tools)


def check_tool_limits(max_rounds: object, tool_timeout: object) -> None:
    """Check the limits of a turn with tools.

    :raises InvalidRequestError: ``max_rounds`` is not an int of at least 1, or ``tool_timeout`` neither a finite number
        above 0 nor None
    """
    if not isinstance(max_rounds, int) or isinstance(max_rounds, bool) or max_rounds < 1:
        raise InvalidRequestError.of("max_rounds", max_rounds, "an int >= 1")
    if tool_timeout is None:
        return
    is_bool = isinstance(tool_timeout, bool)
    if not isinstance(tool_timeout, int | float) or is_bool or not 0 < tool_timeout <= sys.float_info.max:
        raise InvalidRequestError.of("tool_timeout", tool_timeout, "a finite number of seconds > 0, or None")


def _check(request: RequestBuilder, on_error: object) -> None:
    if not isinstance(on_error, str) or on_error not in ("tell", "raise"):
        raise InvalidRequestError.of("on_error", on_error, '"tell" or "raise"')
    for tool in request.options.shown_tools:
        if tool.function is None:
            raise InvalidRequestError.of("tools", tool.name, "a function for every tool that is to be run")
    if request.options.sampling is not None and request.options.sampling.n_choices != 1:
        raise InvalidRequestError.of("n_choices", request.options.sampling.n_choices, "1 where tools are run")


async def _answers(
    calls: Sequence[ToolCallResponse],
    tools: Mapping[str, Tool],
    response: ChatCompletionResponse,
    on_error: OnToolError,
    seconds: float | None,
) -> list[Message]:
    """Run all calls of one answer concurrently, and return their results in order.

    :raises SystemExit: a tool ends the program
    :raises KeyboardInterrupt: a tool has read Ctrl-C from a terminal
    """
    texts: dict[int, str] = {}
    failed: list[tuple[str, BaseException]] = []
    exits: list[SystemExit | KeyboardInterrupt] = []

    def fail(call: ToolCallResponse, scope: anyio.CancelScope, error: BaseException) -> None:
        if on_error == "raise":
            failed.append((call.function.name, error))
            scope.cancel()
        texts[call.index] = f"Error: {_described(error)}"

    async def run(call: ToolCallResponse, scope: anyio.CancelScope) -> None:
        try:
            with anyio.move_on_after(seconds) as limit:
                result = await _run(tools[call.function.name], call.function.parse_arguments())
                texts[call.index] = _as_text(result)
            if limit.cancelled_caught:
                raise TimeoutError(f"it did not return within {seconds:g} seconds")
        except (SystemExit, KeyboardInterrupt) as error:
            exits.append(error)  # raised by the caller: in this task it would end the event loop at once
            scope.cancel()
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise
            fail(call, scope, error)  # something that the tool awaited was cancelled, not the tool
        except Exception as error:
            fail(call, scope, error)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run, call, tasks.cancel_scope)
    if exits:
        raise exits[0]
    if failed:
        name, error = failed[0]
        raise ToolError(
            f"the tool {name} raised {shown(error)}",
            request_id=response.id,
            partial_response=response,
            tool=name,
        ) from error
    return [
        Message("tool", _writable(texts[call.index]), name=call.function.name, tool_call_id=call.id) for call in calls
    ]


async def _run(tool: Tool, arguments: dict[str, Any]) -> object:
    """Call a tool's function; if it is not async, in a thread, because it may block."""
    function = tool.function
    assert function is not None
    given = bind_arguments(function, arguments)
    if inspect.iscoroutinefunction(function):
        return await function(**given)
    result = await in_anyio_thread(partial(function, **given), "to run a tool in")
    return await result if inspect.isawaitable(result) else result


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the exception's own __str__ raised
        return type(error).__name__


def _as_text(result: object) -> str:
    """Return the text of a result for the model: a string as it is, other values as JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _writable(text: str) -> str:
    """Return a text that can be tokenized. Names of files that are not UTF-8 contain lone surrogates in Python; these
    become ``\\u`` escapes, as in JSON.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> object:
    """Return a JSON-compatible value, in the form in which arguments are written: a class's fields, an enum member's
    value, a time in ISO 8601, a set's items; for anything else its text.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Set):
        return list(value)
    if hasattr(type(value), "__pydantic_serializer__") and hasattr(value, "model_dump"):
        try:
            return value.model_dump(mode="json")
        except ValueError:  # it has a value that pydantic cannot serialize
            return dict(value)
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    fields = getattr(type(value), "__dataclass_fields__", None)
    return {name: getattr(value, name) for name in fields} if fields is not None else str(value)
