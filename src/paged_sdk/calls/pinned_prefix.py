"""Finds what the prompts of all continuations of a chat have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import evolve

from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.token_healing import EncodedPrompt
from paged_sdk.kv.contiguous import common_prefix_length
from paged_sdk.types.media import PromptMedia
from paged_sdk.types.messages import Message, TextMessageRole
from paged_sdk.types.request import RequestBuilder

__all__ = ["encode_prefix"]

_TURNS: Final = ("0", "Z")
"""Texts of turns that have no token in common."""


def encode_prefix(preparer: RequestPreparer, request: RequestBuilder, interruption: Interruption) -> EncodedPrompt:
    """Return the tokens with which the prompt of every continuation of a chat begins.

    Templates differ in what they write after a message, or before the last one. So two continuations are rendered, and
    compared: after a user's or a tool's message the answer, or the answer and another question; after any other message
    two questions.

    :param interruption: lets another thread stop a slow rendering
    :raises InvalidRequestError: as for :meth:`RequestPreparer.encode_chat`
    """
    messages, options = request.messages, request.options
    if options.continue_final_message:
        return preparer.encode_chat(messages, options, interruption)
    continuations: list[Sequence[Message]]
    if messages[-1].role in (TextMessageRole.USER, TextMessageRole.TOOL):
        answer, question = (Message(role, _TURNS[0]) for role in (TextMessageRole.ASSISTANT, TextMessageRole.USER))
        continuations = [messages, (*messages, answer, question)]
    else:
        continuations = [(*messages, Message(TextMessageRole.USER, text)) for text in _TURNS]
    first, other = (preparer.encode_chat(each, options, interruption) for each in continuations)
    end = common_prefix_length(list(first.token_ids), list(other.token_ids))
    return EncodedPrompt(first.token_ids[:end], media=_cut(first.media, end))


def _cut(media: PromptMedia | None, end: int) -> PromptMedia | None:
    """Return the images of a prompt's first ``end`` tokens."""
    if media is None:
        return None
    positions = None if media.positions is None else media.positions[:, :end]
    return evolve(media, spans=tuple(span for span in media.spans if span.first_token < end), positions=positions)
