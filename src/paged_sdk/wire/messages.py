"""Maps Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from paged_sdk import (
    ChatCompletionResponse,
    Constraint,
    InvalidRequestError,
    Message,
    RequestBuilder,
    ToolCall,
)
from paged_sdk.wire.body import BodyReader
from paged_sdk.wire.call import ChatCall
from paged_sdk.wire.count_tokens import CountTokensCall
from paged_sdk.wire.messages_answer import BlockWriter, message_of
from paged_sdk.wire.messages_body import (
    AnyOrNoTool,
    ConversationBody,
    CountTokensBody,
    MessagesBody,
    NamedToolChoice,
    ToolDefinition,
    Turn,
)
from paged_sdk.wire.messages_forms import WholeMessage
from paged_sdk.wire.sampling import read_sampling, with_answer_constraint

__all__ = ["COUNT_TOKENS", "MESSAGES", "MessagesCall", "read_count_tokens", "read_messages"]

MESSAGES: Final = BodyReader(MessagesBody)
COUNT_TOKENS: Final = BodyReader(CountTokensBody)

FAILED: Final = "Error: "
"""Prefix of a failed tool's result: chat templates have no field for it."""


@frozen(kw_only=True)
class MessagesCall(ChatCall):
    """Holds a parsed request."""

    max_tokens: int

    def response(self, answer: ChatCompletionResponse) -> WholeMessage:
        """Return a whole answer in the form of Anthropic's API."""
        return message_of(answer, self.model, max_tokens=self.max_tokens, has_one_call=self.has_one_call)

    def writer(self) -> BlockWriter:
        """Return a writer of the answer's events."""
        return BlockWriter(self.model, max_tokens=self.max_tokens, has_one_call=self.has_one_call)


def read_messages(value: object) -> MessagesCall:
    """Parse a body.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = MESSAGES.read(value)
    max_tokens = body["max_tokens"]
    choice = body.get("tool_choice")
    sampling = read_sampling(
        {
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "top_k": body.get("top_k"),
            "stop": body.get("stop_sequences"),
        },
        max_len=max_tokens,
        top_n=None,
    )
    return MessagesCall(
        model=body["model"],
        request=_request(body).with_sampling(sampling),
        max_tokens=max_tokens,
        is_streamed=body.get("stream") or False,
        has_one_call=choice is not None and bool(choice.get("disable_parallel_tool_use")),
        label=(body.get("metadata") or {}).get("user_id"),
    )


def read_count_tokens(value: object) -> CountTokensCall:
    """Parse a body of ``count_tokens``.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = COUNT_TOKENS.read(value)
    return CountTokensCall(model=body["model"], request=_request(body))


def _request(body: ConversationBody) -> RequestBuilder:
    request = RequestBuilder.from_messages(_conversation(body))
    thinking, config = body.get("thinking"), body.get("output_config") or {}
    if body["messages"][-1]["role"] == "assistant":
        if thinking is not None and thinking["type"] != "disabled":
            allowed = 'null or {"type": "disabled"} beside an assistant\'s turn that is to be continued'
            raise InvalidRequestError.of("thinking", thinking, allowed)
        request = request.with_continue_final_message()
    if thinking is not None:
        request = request.with_enable_thinking(thinking["type"] != "disabled")
        if thinking["type"] == "enabled":
            request = request.with_thinking_budget(thinking["budget_tokens"])
    effort, form = config.get("effort"), config.get("format")
    if effort is not None:
        request = request.with_reasoning_effort(effort)
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools or choice is not None:
        request = request.with_tools([_tool(tool) for tool in tools or ()], _choice(choice))
    if form is not None:
        request = with_answer_constraint(request, Constraint.json_schema(form["schema"]))
    return request


def _conversation(body: ConversationBody) -> list[Message]:
    messages = []
    system = body.get("system")
    if system:
        messages.append(Message("system", system if isinstance(system, str) else _joined(system)))
    for place, turn in enumerate(body["messages"]):
        messages += _turn(turn, f"messages[{place}]")
    return messages


def _turn(turn: Turn, at: str) -> list[Message]:
    """Return the messages of a turn: the SDK has tool results in messages of their own."""
    role, content = turn["role"], turn["content"]
    if isinstance(content, str):
        return [Message(role, content)]
    for place, block in enumerate(content):
        kinds = _KINDS[role]
        if block["type"] not in kinds:
            allowed = " or ".join(f'"{kind}"' for kind in kinds) + f" in a turn of the {role}'s"
            raise InvalidRequestError.of(f"{at}.content[{place}].type", block["type"], allowed)
    texts = [block["text"] for block in content if block["type"] == "text"]
    if role == "assistant":
        thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
        calls = [
            ToolCall(block["name"], block["input"], block["id"]) for block in content if block["type"] == "tool_use"
        ]
        return [Message(role, "".join(texts), tool_calls=calls, reasoning_content="".join(thoughts) or None)]
    answers = [_tool_answer(block) for block in content if block["type"] == "tool_result"]
    parts = [_part(block) for block in content if block["type"] != "tool_result"]
    return [*answers, Message.of_parts(role, parts)] if parts or not answers else answers


_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


def _tool_answer(block: Mapping[str, Any]) -> Message:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _joined(content)
    return Message("tool", f"{FAILED}{text}" if block.get("is_error") else text, tool_call_id=block["tool_use_id"])


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    is_data = source["type"] == "base64"
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{source['media_type']};base64,{source['data']}" if is_data else source["url"]},
    }


def _joined(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(block["text"] for block in blocks)


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool["input_schema"],
            "strict": tool.get("strict"),
        },
    }


def _choice(choice: AnyOrNoTool | NamedToolChoice | None) -> str | Mapping[str, Any]:
    match choice:
        case None:
            return "auto"
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "any"}:
            return "required"
        case _:
            return choice["type"]
