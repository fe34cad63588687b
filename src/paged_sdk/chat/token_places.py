"""Find the tokens that make up a part of an output's text."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["TextTokens", "TokenPlaces"]

_T = TypeVar("_T")


class TokenPlaces:
    """Says which characters of an output's text each of its tokens has a part in.

    A character whose bytes lie in several tokens is a part of each of them. The text is that of
    :class:`~paged_sdk.chat.detokenizer.Detokenizer`, which makes these places.

    :param kept: special tokens that have a text all the same
    :param num_left_out: so many bytes at the beginning are not part of the text
    :param strips_space: nor is a space after them
    """

    __slots__ = ("_kept", "_num_characters", "_num_left_out", "_strips_space", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, *, kept: frozenset[int], num_left_out: int, strips_space: bool) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._num_left_out = num_left_out
        self._strips_space = strips_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token_id: int) -> tuple[int, int]:
        """Take the next token, and return the place of its first character and that after its last one: the same where
        it has no text."""
        data = self._tokenizer.decode_bytes((token_id,), skip_special_tokens=True, kept=self._kept)
        if self._num_left_out:
            size = len(data)
            data = data[self._num_left_out :]
            self._num_left_out -= size - len(data)
        if not data:
            return self._num_characters, self._num_characters
        begin = max(self._end_after(data[:1]) - 1, 0)
        return begin, self._end_after(data[1:])

    def _end_after(self, data: bytes) -> int:
        """Take bytes, and return the place after the character that the last of them is part of."""
        text = self._utf8.decode(data)
        self._num_characters += len(text)
        if self._strips_space and text:
            self._strips_space = False
            self._num_characters -= text.startswith(" ")
        # Bytes that wait are the beginning of one more, or of two: the decoder waits amid surrogates, which it refuses.
        return self._num_characters + len(self._utf8.getstate()[0].decode("utf-8", "replace"))


class TextTokens(Generic[_T]):
    """Holds what is known of an output's tokens until it turns out what becomes of their text.

    :ivar num_shown: how many characters of the text have been taken by :meth:`take_next`
    """

    __slots__ = ("_places", "_waiting", "num_shown")

    def __init__(self, places: TokenPlaces) -> None:
        self._places = places
        self._waiting: deque[tuple[int, int, _T]] = deque()
        self.num_shown: int = 0

    def add(self, token_ids: Iterable[int], entries: Sequence[_T]) -> None:
        """Add tokens, and what is known of each."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            begin, end = self._places.next(token_id)
            if begin < end:
                self._waiting.append((begin, end, entry))

    def take(self, runs: Iterable[tuple[int, int]]) -> list[_T]:
        """Return what is known of the tokens that have a part in runs of characters: each token once, with the first
        run that it has a part in.

        :param runs: the beginning and end of each, all of them after those that were taken before
        """
        waiting, taken = self._waiting, []
        for begin, end in runs:
            while waiting and waiting[0][0] < end:
                token = waiting.popleft()
                if token[1] > begin:
                    taken.append(token[2])
        return taken

    def take_next(self, size: int) -> list[_T]:
        """Return the same of the next characters of a text that is not taken apart."""
        begin = self.num_shown
        self.num_shown += size
        return self.take([(begin, self.num_shown)])
