"""Detokenize an output incrementally, while it is generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paged_sdk.chat.token_places import TokenPlaces
from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece.

    Characters are returned as soon as they are complete; bytes of an incomplete character are held back. The pieces and
    the flush, joined, equal ``tokenizer.decode`` of all tokens. Time is linear in the output.

    :param continues_prompt: whether the output continues a plain-text prompt. With a SentencePiece vocabulary, the
        leading space is then kept, which decoding a separate text would strip
    :param kept: special tokens whose text is not skipped
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
        """Drop the first bytes of the output. Call this before the first token."""
        self._num_left_out = num_bytes

    def places(self) -> TokenPlaces:
        """Return an object that maps tokens to places in the text. Call this before the first token."""
        return TokenPlaces(self._tokenizer, kept=self._kept, num_left_out=self._num_left_out, strips_space=self._strip)

    def append(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. Special tokens are skipped unless they are ``kept``."""
        data = self._tokenizer.decode_bytes(ids, skip_special_tokens=True, kept=self._kept)
        if self._num_left_out:
            size = len(data)
            data = data[self._num_left_out :]
            self._num_left_out -= size - len(data)
        return self._emit(data, final=False)

    def flush(self) -> str:
        """Return the rest of the output: U+FFFD if it ended within a character, otherwise nothing."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
