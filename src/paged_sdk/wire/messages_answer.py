"""Writes answers in the form of Anthropic's messages API: whole, or as events."""

from __future__ import annotations

import json
from typing import Any

from paged_sdk import ChatCompletionChunkResponse, ChatCompletionResponse, Choice, Usage
from paged_sdk.wire.call import event
from paged_sdk.wire.messages_forms import Block, MessageUsage, Stop, StopReason, ToolUseAnswer, WholeMessage
from paged_sdk.wire.problem import Problem, anthropic_error
from paged_sdk.wire.shown_calls import ShownCalls

__all__ = ["BlockWriter", "message_of"]


def message_of(
    answer: ChatCompletionResponse, model: str, *, max_tokens: int, has_one_call: bool = False
) -> WholeMessage:
    """Return a whole answer.

    :param model: the model's name in the request
    :param max_tokens: the request's limit of tokens
    :param has_one_call: whether only the first tool call is shown
    """
    (choice,) = answer.choices
    shown = {call.index for call in choice.message.tool_calls[: 1 if has_one_call else None]}
    blocks: list[Block] = []
    for piece in choice.pieces:
        delta = piece.delta
        if delta.reasoning_content:
            blocks.append({"type": "thinking", "thinking": delta.reasoning_content, "signature": ""})
        if delta.content and blocks and blocks[-1]["type"] == "text":  # a call between them is hidden, or was text
            blocks[-1]["text"] += delta.content
        elif delta.content:
            blocks.append({"type": "text", "text": delta.content, "citations": []})
        blocks += [
            _tool_use(call.id, call.function.name, json.loads(call.function.arguments))
            for call in delta.tool_calls
            if call.index in shown
        ]
    return _message(answer, model, blocks, _stop(choice, answer.usage, max_tokens))


def _tool_use(call_id: str, name: str, given: dict[str, Any]) -> ToolUseAnswer:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given, "caller": {"type": "direct"}}


def _message(answer: ChatCompletionResponse, model: str, blocks: list[Block], stop: Stop) -> WholeMessage:
    return {
        "id": f"msg_{answer.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "container": None,
        "content": blocks,
        **stop,
        "usage": _usage(answer.usage),
    }


def _usage(usage: Usage) -> MessageUsage:
    """Return an answer's usage: this API does not count cached tokens among the input tokens."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def _stop(choice: Choice, usage: Usage, max_tokens: int) -> Stop:
    """Return why an answer ended."""
    reason: StopReason
    if choice.finish_reason == "tool_calls":
        reason = "tool_use"
    elif choice.finish_reason == "stop":
        reason = "end_turn" if choice.stop_string is None else "stop_sequence"
    elif choice.finish_reason == "length" and usage.completion_tokens < max_tokens:
        reason = "model_context_window_exceeded"
    else:
        reason = "max_tokens"
    return {
        "stop_reason": reason,
        "stop_sequence": choice.stop_string if reason == "stop_sequence" else None,
        "stop_details": None,
    }


class BlockWriter:
    """Writes an answer as events of content blocks. At most one block is open at a time.

    :param model: the model's name in the request
    :param max_tokens: the request's limit of tokens
    :param has_one_call: whether only the first tool call is shown
    """

    def __init__(self, model: str, *, max_tokens: int, has_one_call: bool = False) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._calls = ShownCalls(has_one_call=has_one_call)
        self._index = -1
        self._open: str | None = None

    def begin(self, answer: ChatCompletionResponse) -> str:
        """Write the ``message_start`` event, and the ``ping`` that follows it in this API."""
        not_yet: Stop = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        message = _message(answer, self._model, [], not_yet)
        return _event("message_start", message=message) + _event("ping")

    def chunk(self, chunk: ChatCompletionChunkResponse) -> str:
        """Write the events of a chunk."""
        events = []
        for choice in chunk.choices:
            delta = choice.delta
            if delta.reasoning_content:
                events += self._block({"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._delta("thinking_delta", thinking=delta.reasoning_content))
            if delta.content:
                events += self._block({"type": "text", "text": "", "citations": []})
                events.append(self._delta("text_delta", text=delta.content))
            for call in self._calls.shown(delta):
                if call.id is not None:
                    events += self._close()
                    events += self._block(_tool_use(call.id, call.name or "", {}))
                if call.arguments:
                    events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return "".join(events)

    def end(self, answer: ChatCompletionResponse) -> str:
        """Write the stop reason and the usage."""
        (choice,) = answer.choices
        stop = _stop(choice, answer.usage, self._max_tokens)
        last = _event("message_delta", delta=stop, usage=_usage(answer.usage))
        return "".join([*self._close(), last, _event("message_stop")])

    def failed(self, problem: Problem) -> str:
        """Write the error that ends the stream."""
        return event(anthropic_error(problem), "error")

    def _block(self, block: Block) -> list[str]:
        """Return the events that open a block; none if a block of this type is open."""
        if self._open == block["type"]:
            return []
        events = self._close()
        self._open = block["type"]
        self._index += 1
        return [*events, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **fields: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)
