"""Convert the pieces of a vocabulary to bytes.

The text of tokens is the UTF-8 decoding of their concatenated bytes. A token may hold part of a character, so a single
token always has bytes, but not always text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import tokenizers
from attrs import frozen

from paged_sdk.errors import CheckpointError

__all__ = ["BYTE_LEVEL_ALPHABET", "PieceDecoder"]


def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET: Mapping[str, int] = MappingProxyType(_byte_level_alphabet())
"""Maps GPT-2's characters to bytes: printable bytes are themselves, the others are U+0100 and following."""

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


@frozen(kw_only=True)
class PieceDecoder:
    """Describes how the pieces of a vocabulary spell bytes.

    :ivar byte_level: whether every character of a piece is one byte in GPT-2's alphabet
    :ivar space: the character that represents a space (SentencePiece's U+2581), or None
    :ivar byte_fallback: whether pieces like ``<0x0A>`` are single bytes
    :ivar strips_leading_space: whether decoding strips one leading space, because encoding adds one
    :ivar continuation: the prefix of pieces that continue a word; all others get a space before them (WordPiece). The
        original spaces around punctuation are lost
    """

    byte_level: bool = False
    space: str | None = None
    byte_fallback: bool = False
    strips_leading_space: bool = False
    continuation: str | None = None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> PieceDecoder:
        """Determine from a tokenizer's decoder how bytes are spelled.

        :raises CheckpointError: the decoder is neither byte-level nor SentencePiece's nor WordPiece's
        """
        found: dict[str, Any] = {}
        for step in _steps(backend):
            match step:
                case {"type": "ByteLevel"}:
                    found["byte_level"] = True
                case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": str(scheme)}:
                    found["space"] = space
                    found["strips_leading_space"] = scheme != "never"
                case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                    found["space"] = space
                case {"type": "ByteFallback"}:
                    found["byte_fallback"] = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if start <= 1:
                    found["strips_leading_space"] = start == 1
                case {"type": "WordPiece", "prefix": str(prefix)} if prefix:
                    found["continuation"], found["strips_leading_space"] = prefix, True
                case {"type": "Fuse"}:
                    pass
                case _:
                    raise CheckpointError(
                        f"the tokenizer's decoder step {json.dumps(step)} is not supported: "
                        "byte-level, SentencePiece and WordPiece decoders are"
                    )
        return cls(**found)

    def to_bytes(self, piece: str, *, literal: bool) -> bytes:
        """Return the bytes of one piece.

        :param literal: whether a byte-level piece is plain text (an added token), not spelled in the alphabet
        """
        if self.byte_level:
            if literal or not BYTE_LEVEL_ALPHABET.keys() >= set(piece):
                return piece.encode()
            return bytes(map(BYTE_LEVEL_ALPHABET.__getitem__, piece))
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self.continuation is not None:
            goes_on = piece.startswith(self.continuation)
            return (piece.removeprefix(self.continuation) if goes_on else f" {piece}").encode()
        return (piece if self.space is None else piece.replace(self.space, " ")).encode()


def _steps(backend: tokenizers.Tokenizer) -> Iterator[object]:
    if backend.decoder is None:
        supported = "byte-level, SentencePiece and WordPiece decoders are supported"
        raise CheckpointError(f"the tokenizer has no decoder: {supported}")
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step
