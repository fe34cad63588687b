"""Write answers as OpenAI's responses API has them: whole, or as events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

from paged_sdk import ChatCompletionChunkResponse, ChatCompletionResponse, Logprobs, ToolCallDelta
from paged_sdk.wire.call import event
from paged_sdk.wire.problem import Problem, responses_problem
from paged_sdk.wire.responses_body import ReasoningText, Status
from paged_sdk.wire.responses_forms import (
    CallItem,
    Item,
    MessageItem,
    ResponseUsage,
    Said,
    TextOutput,
    ThoughtItem,
    WholeResponse,
)

__all__ = ["ItemWriter", "response_of"]


def response_of(answer: ChatCompletionResponse, said: Said, *, has_one_call: bool = False) -> WholeResponse:
    """Return a whole answer.

    :param said: what it repeats of the request
    :param has_one_call: whether calls of functions but the first are left out
    """
    (choice,) = answer.choices
    message, status = choice.message, _status(answer)
    items: list[Item] = []
    if message.reasoning_content is not None:
        items.append(_reasoning(_id(answer, "rs", 0), message.reasoning_content, "completed"))
    if message.content or not message.tool_calls:
        items.append(_message(_id(answer, "msg", len(items)), message.content, _logprobs(choice.logprobs), "completed"))
    items += [
        _call(call.id, call.function.name, call.function.arguments, "completed")
        for call in message.tool_calls[: 1 if has_one_call else None]
    ]
    if status == "incomplete":
        items[-1]["status"] = "incomplete"
    return _whole(answer, said, items)


def _id(answer: ChatCompletionResponse, kind: str, place: int) -> str:
    return f"{kind}_{answer.id.removeprefix('chatcmpl-')}{place:02d}"


def _status(answer: ChatCompletionResponse) -> Literal["completed", "incomplete"]:
    return "completed" if answer.choices[0].finish_reason in ("stop", "tool_calls") else "incomplete"


def _begun(answer: ChatCompletionResponse, said: Said) -> WholeResponse:
    """Return a response that has nothing in it yet."""
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
        **said,
    }


def _whole(answer: ChatCompletionResponse, said: Said, items: list[Item]) -> WholeResponse:
    status = _status(answer)
    return {
        **_begun(answer, said),
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
        # Nobody counts them apart: it is their share of the characters.
        "output_tokens_details": {"reasoning_tokens": round(usage.completion_tokens * thought / max(written, 1))},
        "total_tokens": usage.total_tokens,
    }


def _logprobs(logprobs: Logprobs | None) -> list[Any]:
    return [] if logprobs is None else [token.to_dict() for token in logprobs.content]


def _reasoning(item_id: str, text: str, status: Status) -> ThoughtItem:
    content: list[ReasoningText] = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _text_part(text: str, logprobs: list[Any]) -> TextOutput:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(item_id: str, text: str, logprobs: list[Any], status: Status) -> MessageItem:
    content = [_text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call(call_id: str, name: str, arguments: str, status: Status) -> CallItem:
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


class ItemWriter:
    """Writes an answer as events of items, of which one is open at a time.

    :param said: what a response repeats of its request
    :param has_one_call: whether calls of functions but the first are left out
    """

    def __init__(self, said: Said, *, has_one_call: bool = False) -> None:
        self._said = said
        self._has_one_call = has_one_call
        self._sequence_number = 0
        self._answer: ChatCompletionResponse | None = None
        self._items: list[Any] = []
        self._kind: str | None = None
        self._item: Any = None
        self._pieces: list[str] = []
        self._call_index = 0
        self._whole_calls: set[int] = set()
        self._unsent: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self, answer: ChatCompletionResponse) -> str:
        """Write that there will be a response."""
        self._answer = answer
        body = _begun(answer, self._said)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def chunk(self, chunk: ChatCompletionChunkResponse) -> str:
        """Write what a chunk adds."""
        events = []
        for choice in chunk.choices:
            delta = choice.delta
            self._unsent += _logprobs(choice.logprobs)
            self._whole_calls.update(call.index for call in delta.tool_calls)
            if delta.reasoning_content:
                events += self._open("reasoning")
                events.append(self._add("response.reasoning_text.delta", delta.reasoning_content))
            # What is new of the call that is open belongs before a text that comes with it: the text came after it.
            events += self._arguments(call for call in delta.tool_call_deltas if call.id is None)
            if delta.content:
                events += self._open("message")
                events.append(self._add("response.output_text.delta", delta.content, logprobs=self._take_logprobs()))
            events += self._arguments(call for call in delta.tool_call_deltas if call.id is not None)
        return "".join(events)

    def end(self, answer: ChatCompletionResponse) -> str:
        """Write how the response has ended, and all of it."""
        events = [] if self._items or self._kind else self._open("message")
        status = _status(answer)
        events += self._close(status)
        events.append(self._event(f"response.{status}", response=_whole(answer, self._said, self._items)))
        return "".join(events)

    def failed(self, problem: Problem) -> str:
        """Write why no more comes."""
        named = responses_problem(problem)
        code = "rate_limit_exceeded" if named.status == 429 else "server_error"
        body = {**_begun(self._begun, self._said), "output": self._items, "status": "failed"}
        error = {"code": code, "message": named.message}
        return self._event("response.failed", response={**body, "error": error})

    def _arguments(self, calls: Iterable[ToolCallDelta]) -> list[str]:
        """Return the events of what is new of calls; one that has an identifier begins."""
        events = []
        for call in calls:
            if self._has_one_call and call.index > 0:
                continue
            if call.id is not None:
                events += self._close()
                events += self._open("function_call", _call(call.id, call.name or "", "", "in_progress"))
                self._call_index = call.index
            if call.arguments:
                events.append(self._add("response.function_call_arguments.delta", call.arguments))
        return events

    @property
    def _begun(self) -> ChatCompletionResponse:
        assert self._answer is not None, "begin comes first"
        return self._answer

    def _open(self, kind: str, item: CallItem | None = None) -> list[str]:
        """Return the events that begin an item, unless one of its kind is open."""
        if self._kind == kind:
            return []
        events = self._close()
        place = len(self._items)
        self._kind, self._pieces, self._logprobs = kind, [], []
        if item is not None:
            self._item = item
        elif kind == "reasoning":
            self._item = _reasoning(_id(self._begun, "rs", place), "", "in_progress")
        else:
            self._item = {**_message(_id(self._begun, "msg", place), "", [], "in_progress"), "content": []}
        events.append(self._event("response.output_item.added", output_index=place, item=self._item))
        if kind != "function_call":
            events.append(self._of_item("response.content_part.added", content_index=0, part=self._part("")))
        return events

    def _add(self, name: str, text: str, **fields: Any) -> str:
        self._pieces.append(text)
        return self._of_item(name, **self._place(), delta=text, **fields)

    def _close(self, status: str = "completed") -> list[str]:
        """Return the events that end the item that is open."""
        if self._kind is None:
            return []
        text = "".join(self._pieces)
        if self._kind == "function_call":
            if self._call_index not in self._whole_calls:
                status = "incomplete"
            self._item = {**self._item, "arguments": text, "status": status}
            name = self._item["name"]
            events = [self._of_item("response.function_call_arguments.done", name=name, arguments=text)]
        else:
            done = "response.reasoning_text.done"
            fields: dict[str, Any] = {"text": text}
            if self._kind == "message":
                self._take_logprobs()
                done, fields["logprobs"] = "response.output_text.done", self._logprobs
            part = self._part(text)
            self._item = {**self._item, "content": [part], "status": status}
            events = [
                self._of_item(done, content_index=0, **fields),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=self._item))
        self._items.append(self._item)
        self._kind = None
        return events

    def _part(self, text: str) -> TextOutput | ReasoningText:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return _text_part(text, self._logprobs)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        taken, self._unsent = self._unsent, []
        self._logprobs += taken
        return taken

    def _place(self) -> dict[str, int]:
        return {} if self._kind == "function_call" else {"content_index": 0}

    def _of_item(self, kind: str, /, **fields: Any) -> str:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._items), **fields)

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": self._sequence_number - 1, **fields}, kind)
