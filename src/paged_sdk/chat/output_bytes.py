"""Decode the bytes of an output's tokens incrementally."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["OutputBytes"]


class OutputBytes:
    """Turns the tokens of one output into bytes, and these into text, piece by piece.

    :param kept: special tokens whose text is not skipped
    :param num_left_out: number of bytes to drop from the beginning of the output
    :param strips_space: whether to drop a space after these bytes, too
    """

    __slots__ = ("_kept", "_num_left_out", "_strips_space", "_tokenizer", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, *, kept: frozenset[int], num_left_out: int = 0, strips_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._num_left_out = num_left_out
        self._strips_space = strips_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_waiting(self) -> int:
        """Return the number of characters that the bytes of an incomplete character would become if no more came."""
        # Usually one, but two or more for the beginning of an encoded surrogate, which is invalid.
        return len(self._utf8.getstate()[0].decode("utf-8", "replace"))

    def leave_out(self, num_bytes: int) -> None:
        """Drop the first bytes of the output. Call this before the first token."""
        self._num_left_out = num_bytes

    def copy(self) -> OutputBytes:
        """Return an independent copy. Call this before the first token."""
        return OutputBytes(
            self._tokenizer, kept=self._kept, num_left_out=self._num_left_out, strips_space=self._strips_space
        )

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Add tokens, and return their bytes, without those to drop. Special tokens are skipped unless ``kept``."""
        data = self._tokenizer.decode_bytes(token_ids, skip_special_tokens=True, kept=self._kept)
        if self._num_left_out:
            size = len(data)
            data = data[self._num_left_out :]
            self._num_left_out -= size - len(data)
        return data

    def text_of(self, data: bytes, *, is_last: bool = False) -> str:
        """Add bytes, and return the text that they complete.

        :param is_last: whether no more bytes follow, so that the bytes of an incomplete character become U+FFFD
        """
        text = self._utf8.decode(data, is_last)
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
