"""Hold the logprobs of a text's tokens, and write them in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from paged_sdk.types.wire import Wire

__all__ = ["Logprobs", "TextOffsets", "TokenLogprob", "TopLogprob"]

LOWEST_LOGPROB = -9999.0
"""OpenAI's API writes this for a token that cannot occur: JSON has no infinity."""


@frozen(kw_only=True)
class TopLogprob(Wire):
    """Describes one of the likeliest tokens at a position.

    :ivar token: the token's text; bytes that are not UTF-8 show as U+FFFD
    :ivar token_id: the token; an extension in the wire form
    :ivar logprob: natural logarithm of its probability, before temperature and truncation
    :ivar bytes: its bytes
    """

    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return _token_fields(self)


@frozen(kw_only=True)
class TokenLogprob(Wire):
    """Describes the chosen token at a position, and the likeliest ones there."""

    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return {**_token_fields(self), "top_logprobs": [top.to_dict() for top in self.top_logprobs]}


@frozen(kw_only=True)
class Logprobs(Wire):
    """Holds the logprobs of one text. :meth:`to_dict` gives the form for chats.

    :ivar content: one entry per token
    """

    content: tuple[TokenLogprob, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the wire form."""
        return {"content": [token.to_dict() for token in self.content], "refusal": None}

    def to_completion_dict(self, text: str) -> dict[str, Any]:
        """Return the form of plain-text completions: parallel lists.

        A token whose bytes are no UTF-8 by themselves is written ``bytes:\\xe2\\x98``, as OpenAI's API does, since
        tokens are the keys of ``top_logprobs``.

        :param text: the text that the tokens make up; ``text_offset`` counts its characters, so that each piece of a
            stream counts from its own beginning: :class:`TextOffsets` counts from that of the whole
        """
        return {
            "text_offset": TextOffsets().take(self.content, text),
            "token_logprobs": [_finite(token.logprob) for token in self.content],
            "tokens": [_key(token) for token in self.content],
            "top_logprobs": [{_key(top): _finite(top.logprob) for top in token.top_logprobs} for token in self.content],
        }


class TextOffsets:
    """Computes the offsets of a text's tokens in the text, in characters, piece by piece.

    Tokens may split characters, and the text may lack some of the tokens' characters: a leading space that decoding
    removes, the end token, and what a stop string cut off, whose tokens have the offsets that they would have without
    it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # as in the text
        self._num_chars = 0
        self._first: bytes | None = None  # bytes of the first token that has any, until text has arrived

    def take(self, tokens: Sequence[TokenLogprob], text: str) -> list[int]:
        """Return the offsets of the next tokens from the beginning of the whole text.

        :param text: the piece of the text that comes with them; it may come later, where a stop string may begin
        """
        if self._first is None:
            self._first = next((bytes(token.bytes) for token in tokens if token.bytes), None)
        if self._first and text:
            self._num_chars -= self._first.startswith(b" ") and not text.startswith(" ")
            self._first = b""
        offsets = []
        for token in tokens:
            data = bytes(token.bytes)
            before = self._num_chars + len(self._decoder.decode(data[:1]))
            # The first byte may be in the middle of a character, or show that the bytes before it were invalid.
            waiting = self._decoder.getstate()[0].decode("utf-8", "replace")
            begin = before + len(waiting) - 1 if data else before
            self._num_chars = before + len(self._decoder.decode(data[1:]))
            offsets.append(max(begin, 0))
        return offsets


def _token_fields(token: TopLogprob | TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "bytes": list(token.bytes),
        "logprob": _finite(token.logprob),
        "token_id": token.token_id,
    }


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST_LOGPROB)


def _key(token: TopLogprob | TokenLogprob) -> str:
    data = bytes(token.bytes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
