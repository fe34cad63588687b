"""Holds whole responses with mistral.rs's attributes, made from the SDK's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

import paged_sdk
from paged_sdk import CalledFunction, Usage
from paged_sdk.mistralrs.enums import ToolCallType
from paged_sdk.mistralrs.logprobs import Logprobs

__all__ = [
    "AgenticToolCallRecord",
    "ChatCompletionResponse",
    "Choice",
    "CompletionChoice",
    "CompletionResponse",
    "ResponseMessage",
    "ToolCallResponse",
    "called",
]


@frozen(kw_only=True)
class ToolCallResponse:
    """Holds a tool call that the model has made.

    :ivar index: its place among the calls of the answer
    :ivar tp: the type of call: always a function
    """

    index: int
    id: str
    tp: ToolCallType
    function: CalledFunction


def called(calls: Sequence[paged_sdk.ToolCallResponse]) -> list[ToolCallResponse] | None:
    """Convert the SDK's calls; None if there are none."""
    return [
        ToolCallResponse(index=call.index, id=call.id, tp=ToolCallType.Function, function=call.function)
        for call in calls
    ] or None


@frozen(kw_only=True)
class ResponseMessage:
    """Holds the model's turn.

    :ivar content: the text without reasoning and calls; None: there are only calls
    :ivar tool_calls: calls of the request's tools; None: none
    :ivar reasoning_content: the model's reasoning before its answer; None: none
    """

    content: str | None
    role: str
    tool_calls: list[ToolCallResponse] | None
    reasoning_content: str | None = None


@frozen(kw_only=True)
class Choice:
    """Holds one answer of a chat response.

    :ivar stop_sequence: the one of ``stop_seqs`` that ended it; None: something else did
    """

    finish_reason: str
    index: int
    message: ResponseMessage
    logprobs: Logprobs | None = None
    stop_sequence: str | None = None

    @classmethod
    def of(cls, choice: paged_sdk.Choice) -> Choice:
        """Convert a choice of the SDK's."""
        said = choice.message
        message = ResponseMessage(
            content=None if said.tool_calls and not said.content else said.content,
            role=said.role,
            tool_calls=called(said.tool_calls),
            reasoning_content=said.reasoning_content,
        )
        return cls(
            finish_reason=choice.finish_reason,
            index=choice.index,
            message=message,
            logprobs=Logprobs.of(choice.logprobs),
            stop_sequence=choice.stop_string,
        )


@frozen(kw_only=True)
class AgenticToolCallRecord:
    """Describes a call that one of the runner's ``tool_callbacks`` ran.

    :ivar round: 0 for the calls of the model's first answer
    :ivar arguments: JSON text of an object
    :ivar result_content: the text that the model got
    :ivar result_images_base64: always empty: a callback returns a text
    :ivar file_ids: always empty, likewise
    """

    round: int
    name: str
    arguments: str
    result_content: str
    result_images_base64: list[str] = field(factory=list)
    file_ids: list[str] = field(factory=list)


@frozen(kw_only=True)
class ChatCompletionResponse:
    """Holds a whole chat response.

    :ivar created: Unix time in seconds
    :ivar adapter_generation: of the adapter used; None: none
    :ivar agentic_tool_calls: the calls that ``tool_callbacks`` ran for it, in order; None: none
    :ivar files: always None: there are no files
    :ivar session_id: always None: there are no sessions
    """

    id: str
    choices: list[Choice]
    created: int
    model: str
    system_fingerprint: str
    object: str
    usage: Usage
    adapter_generation: str | None = None
    agentic_tool_calls: list[AgenticToolCallRecord] | None = None
    files: None = None
    session_id: None = None
    _response: paged_sdk.ChatCompletionResponse = field(eq=False, repr=False)

    @classmethod
    def of(
        cls,
        response: paged_sdk.ChatCompletionResponse,
        *,
        adapter_generation: str | None,
        agentic_tool_calls: Sequence[AgenticToolCallRecord] = (),
    ) -> ChatCompletionResponse:
        """Convert a response of the SDK's."""
        return cls(
            id=response.id,
            choices=[Choice.of(choice) for choice in response.choices],
            created=response.created,
            model=response.model,
            system_fingerprint=response.system_fingerprint,
            object=response.object,
            usage=response.usage,
            adapter_generation=adapter_generation,
            agentic_tool_calls=list(agentic_tool_calls) or None,
            response=response,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's wire form."""
        return self._response.to_dict()

    def to_json(self) -> str:
        """Return OpenAI's wire form as JSON text."""
        return self._response.to_json()


@frozen(kw_only=True)
class CompletionChoice:
    """Holds one text of a completion."""

    finish_reason: str
    index: int
    text: str
    logprobs: Logprobs | None = None


@frozen(kw_only=True)
class CompletionResponse:
    """Holds a whole plain-text completion; its attributes are those of :class:`ChatCompletionResponse`."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    system_fingerprint: str
    object: str
    usage: Usage
    adapter_generation: str | None = None
    _response: paged_sdk.CompletionResponse = field(eq=False, repr=False)

    @classmethod
    def of(cls, response: paged_sdk.CompletionResponse, *, adapter_generation: str | None) -> CompletionResponse:
        """Convert a response of the SDK's."""
        return cls(
            id=response.id,
            choices=[
                CompletionChoice(
                    finish_reason=choice.finish_reason,
                    index=choice.index,
                    text=choice.text,
                    logprobs=Logprobs.of(choice.logprobs),
                )
                for choice in response.choices
            ],
            created=response.created,
            model=response.model,
            system_fingerprint=response.system_fingerprint,
            object=response.object,
            usage=response.usage,
            adapter_generation=adapter_generation,
            response=response,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's wire form."""
        return self._response.to_dict()

    def to_json(self) -> str:
        """Return OpenAI's wire form as JSON text."""
        return self._response.to_json()
