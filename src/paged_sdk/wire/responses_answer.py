"""Writes answers in the form of OpenAI's responses API: whole, or as events."""

from __future__ import annotations

import time
from typing import Any, Final, Literal

from attrs import define, field, frozen

from paged_sdk import ChatCompletionChunkResponse, ChatCompletionResponse, ChunkChoice, Logprobs, ToolCallDelta
from paged_sdk.wire.call import event
from paged_sdk.wire.problem import Problem, responses_problem
from paged_sdk.wire.responses_body import Status
from paged_sdk.wire.responses_forms import (
    CallItem,
    Item,
    MessageItem,
    RepeatedFields,
    ResponseUsage,
    ThoughtItem,
    WholeResponse,
)
from paged_sdk.wire.shown_calls import ShownCalls

__all__ = ["ItemWriter", "response_of"]


def response_of(
    answer: ChatCompletionResponse, repeated: RepeatedFields, *, has_one_call: bool = False
) -> WholeResponse:
    """Return a whole answer.

    :param repeated: the fields of the request that the response repeats
    :param has_one_call: whether only the first function call is shown
    """
    return ItemWriter(repeated, has_one_call=has_one_call).whole(answer)


def _id(answer: ChatCompletionResponse, kind: str, place: int) -> str:
    return f"{kind}_{answer.id.removeprefix('chatcmpl-')}{place:02d}"


def _status(answer: ChatCompletionResponse) -> Literal["completed", "incomplete"]:
    return "completed" if answer.choices[0].finish_reason in ("stop", "tool_calls") else "incomplete"


def _begun(answer: ChatCompletionResponse, repeated: RepeatedFields) -> WholeResponse:
    """Return an empty response that is in progress."""
    return {
        "id": f"resp_{answer.id.removeprefix('chatcmpl-')}",
        "object": "response",
        "created_at": answer.created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **repeated,
    }


def _whole(answer: ChatCompletionResponse, repeated: RepeatedFields, items: list[Item]) -> WholeResponse:
    status = _status(answer)
    return {
        **_begun(answer, repeated),
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
        "output": items,
        "usage": _usage(answer),
    }


def _usage(answer: ChatCompletionResponse) -> ResponseUsage:
    usage, message = answer.usage, answer.choices[0].message
    thought = len(message.reasoning_content or "")
    written = thought + len(message.content)
    written += sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        # Estimated by the reasoning's share of the characters: reasoning tokens are not counted separately.
        "output_tokens_details": {"reasoning_tokens": round(usage.completion_tokens * thought / max(written, 1))},
        "total_tokens": usage.total_tokens,
    }


def _logprobs(logprobs: Logprobs | None) -> list[Any]:
    return [] if logprobs is None else [token.to_dict() for token in logprobs.content]


def _reasoning(item_id: str) -> ThoughtItem:
    """Return an empty item of reasoning, in progress."""
    return {"id": item_id, "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}


def _message(item_id: str) -> MessageItem:
    """Return an empty message, in progress."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _call(call_id: str, name: str, arguments: str, status: Status) -> CallItem:
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


@frozen
class _TextKind:
    """Describes how text is written that is the one part of an item.

    :ivar part: the part's type
    :ivar of_text: prefix of the names of events that add text
    :ivar of_part: prefix of the names of events that start and end the part
    :ivar holder: the item's field that holds the part
    :ivar index: the events' field that holds the part's index
    """

    part: Literal["output_text", "reasoning_text", "summary_text"]
    of_text: str
    of_part: str = "response.content_part"
    holder: str = "content"
    index: str = "content_index"


_TEXT: Final = _TextKind("output_text", "response.output_text")
_REASONING: Final = _TextKind("reasoning_text", "response.reasoning_text")
_SUMMARY: Final = _TextKind(
    "summary_text",
    "response.reasoning_summary_text",
    of_part="response.reasoning_summary_part",
    holder="summary",
    index="summary_index",
)


@define
class _OpenItem:
    """Holds an item whose end has not been written.

    :ivar kind: how its text is written; None: a call
    :ivar place: index among the items
    :ivar item: the item's form in its first event
    :ivar call: index among the answer's calls, of a call
    :ivar pieces: the text or arguments so far
    :ivar logprobs: logprobs of a message's tokens so far
    """

    kind: _TextKind | None
    place: int
    item: Any
    call: int | None = None
    pieces: list[str] = field(factory=list)
    logprobs: list[dict[str, Any]] = field(factory=list)


class ItemWriter:
    """Writes an answer as events of items. Only the last item grows, except for calls.

    Some models write several calls before it is known whether these are calls or text. Such calls are ended once that
    is known.

    :param repeated: the fields of the request that the response repeats
    :param has_one_call: whether only the first function call is shown
    """

    def __init__(self, repeated: RepeatedFields, *, has_one_call: bool = False) -> None:
        self._repeated = repeated
        self._reasoning = _REASONING if repeated["reasoning"]["summary"] is None else _SUMMARY
        self._calls = ShownCalls(has_one_call=has_one_call)
        self._sequence_number = 0
        self._answer: ChatCompletionResponse | None = None
        self._items: list[Any] = []  # None: an item that has not ended
        self._last: _OpenItem | None = None
        self._unsure: list[_OpenItem] = []
        self._whole_calls: set[int] = set()

    def whole(self, answer: ChatCompletionResponse) -> WholeResponse:
        """Return the response in the last event of an answer's stream."""
        self.begin(answer)
        for piece in answer.choices[0].pieces:
            self._add_piece(piece)
        self.end(answer)
        return _whole(answer, self._repeated, self._items)

    def begin(self, answer: ChatCompletionResponse) -> str:
        """Write the events that start a response."""
        self._answer = answer
        body = _begun(answer, self._repeated)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def chunk(self, chunk: ChatCompletionChunkResponse) -> str:
        """Write the events of a chunk."""
        return "".join(event for choice in chunk.choices for event in self._add_piece(choice))

    def end(self, answer: ChatCompletionResponse) -> str:
        """Write the events that end all items, and the whole response."""
        events = [] if self._items else self._open(_TEXT)
        status = _status(answer)
        events += self._end_all(status)
        events.append(self._event(f"response.{status}", response=_whole(answer, self._repeated, self._items)))
        return "".join(events)

    def failed(self, problem: Problem) -> str:
        """Write the error that ends the stream, with the items that had ended."""
        named = responses_problem(problem)
        code = "rate_limit_exceeded" if named.status == 429 else "server_error"
        ended = [item for item in self._items if item is not None]
        body = {**_begun(self._answer_so_far, self._repeated), "output": ended, "status": "failed"}
        error = {"code": code, "message": named.message}
        return self._event("response.failed", response={**body, "error": error})

    def _add_piece(self, piece: ChunkChoice) -> list[str]:
        """Return the events of one choice's piece."""
        events, delta = [], piece.delta
        self._whole_calls.update(call.index for call in delta.tool_calls)
        if delta.reasoning_content:
            events += self._open(self._reasoning)
            events.append(self._add(self._reasoning, delta.reasoning_content))
        if delta.content:
            events += self._open(_TEXT)
            logprobs = _logprobs(piece.content_logprobs)
            self._open_item.logprobs += logprobs
            events.append(self._add(_TEXT, delta.content, logprobs=logprobs))
        for call in self._calls.shown(delta):
            if call.id is not None:
                events += self._open_call(call.index, _call(call.id, call.name or "", "", "in_progress"))
            if call.arguments:
                events.append(self._add_arguments(call))
        return [*events, *self._end_known()]

    @property
    def _answer_so_far(self) -> ChatCompletionResponse:
        assert self._answer is not None, "begin comes first"
        return self._answer

    @property
    def _open_item(self) -> _OpenItem:
        assert self._last is not None, "something is added to an item that has begun"
        return self._last

    def _open(self, kind: _TextKind) -> list[str]:
        """Return the events that start a message or reasoning; none if one of this kind is open."""
        if self._last is not None and self._last.kind == kind:
            return []
        events = self._end_all()
        place = len(self._items)
        if kind is _TEXT:
            item: Any = _message(_id(self._answer_so_far, "msg", place))
        else:
            item = _reasoning(_id(self._answer_so_far, "rs", place))
        events.append(self._add_item(_OpenItem(kind, place, item)))
        return [*events, self._of_part(self._open_item, kind, f"{kind.of_part}.added", part=_part(kind, "", []))]

    def _open_call(self, index: int, item: CallItem) -> list[str]:
        """Return the events that start a call."""
        events = []
        if self._last is not None and self._last.kind is None and self._last.call not in self._whole_calls:
            self._unsure.append(self._last)
        else:
            events += self._end_all()
        return [*events, self._add_item(_OpenItem(None, len(self._items), item, index))]

    def _add_item(self, item: _OpenItem) -> str:
        self._last = item
        self._items.append(None)
        return self._event("response.output_item.added", output_index=item.place, item=item.item)

    def _add(self, kind: _TextKind, text: str, **fields: Any) -> str:
        """Write text that is appended to the open message or reasoning."""
        self._open_item.pieces.append(text)
        return self._of_part(self._open_item, kind, f"{kind.of_text}.delta", delta=text, **fields)

    def _add_arguments(self, call: ToolCallDelta) -> str:
        item = next(each for each in (self._open_item, *self._unsure) if each.call == call.index)
        item.pieces.append(call.arguments)
        return self._of_item(item, "response.function_call_arguments.delta", delta=call.arguments)

    def _end_known(self) -> list[str]:
        """Return the events that end earlier calls that are now known to be calls; the last one stays open."""
        known = [each for each in self._unsure if each.call in self._whole_calls]
        self._unsure = [each for each in self._unsure if each.call not in self._whole_calls]
        return [event for each in known for event in self._end(each, "completed")]

    def _end_all(self, status: Status = "completed") -> list[str]:
        """Return the events that end all open items. Incomplete calls get the status "incomplete".

        :param status: status of a message or reasoning
        """
        events = self._end_known()
        for item in (*self._unsure, self._last):
            if item is not None and item.kind is None:
                events += self._end(item, "completed" if item.call in self._whole_calls else "incomplete")
            elif item is not None:
                events += self._end(item, status)
        self._unsure, self._last = [], None
        return events

    def _end(self, item: _OpenItem, status: Status) -> list[str]:
        text, kind = "".join(item.pieces), item.kind
        if kind is None:
            ended = {**item.item, "arguments": text, "status": status}
            done = "response.function_call_arguments.done"
            events = [self._of_item(item, done, name=ended["name"], arguments=text)]
        else:
            logprobs = {"logprobs": item.logprobs} if kind is _TEXT else {}
            part = _part(kind, text, item.logprobs)
            ended = {**item.item, kind.holder: [part], "status": status}
            events = [
                self._of_part(item, kind, f"{kind.of_text}.done", text=text, **logprobs),
                self._of_part(item, kind, f"{kind.of_part}.done", part=part),
            ]
        self._items[item.place] = ended
        return [*events, self._event("response.output_item.done", output_index=item.place, item=ended)]

    def _of_part(self, item: _OpenItem, kind: _TextKind, name: str, /, **fields: Any) -> str:
        return self._of_item(item, name, **{kind.index: 0}, **fields)

    def _of_item(self, item: _OpenItem, kind: str, /, **fields: Any) -> str:
        return self._event(kind, item_id=item.item["id"], output_index=item.place, **fields)

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": self._sequence_number - 1, **fields}, kind)


def _part(kind: _TextKind, text: str, logprobs: list[Any]) -> dict[str, Any]:
    """Return a part of an item: a ``TextOutput``, ``ReasoningText`` or ``SummaryText``."""
    more = {"annotations": [], "logprobs": logprobs} if kind is _TEXT else {}
    return {"type": kind.part, "text": text, **more}
