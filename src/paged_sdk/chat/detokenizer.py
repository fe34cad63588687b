"""Turn tokens into text while they are being generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paged_sdk.chat.token_places import TokenPlaces
from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece.

    A piece appears as soon as its characters are whole; bytes of an unfinished character wait for the rest. The pieces
    and the flush, joined, are ``tokenizer.decode`` of all tokens. Time is linear in the output, whatever its bytes.

    :param continues_prompt: the output goes on where a plain-text prompt ended. A SentencePiece vocabulary then keeps
        the space before the first word, which decoding a text of its own takes away.
    :param kept: special tokens that have a text all the same
    """

    __slots__ = ("_kept", "_num_left_out", "_strip", "_tokenizer", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, *, continues_prompt: bool = False, kept: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._num_left_out = 0
        self._kept = kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space and not continues_prompt

    def leave_out(self, num_bytes: int) -> None:
        """Leave out the first bytes of the output."""
        self._num_left_out = num_bytes

    def places(self) -> TokenPlaces:
        """Return what says where in the text the tokens stand. No token has come yet."""
        return TokenPlaces(self._tokenizer, kept=self._kept, num_left_out=self._num_left_out, strips_space=self._strip)

    def append(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; special tokens have no text, but for those that are kept."""
        data = self._tokenizer.decode_bytes(ids, skip_special_tokens=True, kept=self._kept)
        if self._num_left_out:
            size = len(data)
            data = data[self._num_left_out :]
            self._num_left_out -= size - len(data)
        return self._emit(data, final=False)

    def flush(self) -> str:
        """Return what is left of an output that ended within a character: U+FFFD for it, or nothing."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
