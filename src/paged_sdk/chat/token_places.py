"""Map parts of an output's text to the tokens that they come from."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["TextTokens", "TokenPlaces"]

_T = TypeVar("_T")


class TokenPlaces:
    """Maps each token of an output to the characters of the text that it contributes to.

    A character whose bytes are spread over several tokens belongs to each of them. The text is that of
    :class:`~paged_sdk.chat.detokenizer.Detokenizer`, which makes these objects.

    :param kept: special tokens whose text is not skipped
    :param num_left_out: number of bytes dropped from the beginning of the output
    :param strips_space: whether a space after these bytes is dropped, too
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
        """Add the next token. Return the place of its first character, and the place after its last one: both are the
        same if it has no text."""
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
        """Decode bytes, and return the place after the character that the last byte belongs to."""
        text = self._utf8.decode(data)
        self._num_characters += len(text)
        if self._strips_space and text:
            self._strips_space = False
            self._num_characters -= text.startswith(" ")
        # Held-back bytes will become one more character, or two: the decoder also holds back the beginning of an
        # encoded surrogate, which is invalid and becomes several U+FFFD.
        return self._num_characters + len(self._utf8.getstate()[0].decode("utf-8", "replace"))


class TextTokens(Generic[_T]):
    """Keeps an entry for each token of an output, such as its logprobs, until the use of its text is known.

    :ivar num_shown: number of characters taken by :meth:`take_next`
    """

    __slots__ = ("_places", "_waiting", "num_shown")

    def __init__(self, places: TokenPlaces) -> None:
        self._places = places
        self._waiting: deque[tuple[int, int, _T]] = deque()
        self.num_shown: int = 0

    def add(self, token_ids: Iterable[int], entries: Sequence[_T]) -> None:
        """Add tokens and their entries."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            begin, end = self._places.next(token_id)
            if begin < end:
                self._waiting.append((begin, end, entry))

    def take(self, runs: Iterable[tuple[int, int]]) -> list[_T]:
        """Return the entries of the tokens that contribute to runs of characters: each token once, with the first such
        run.

        :param runs: beginning and end of each run, in order, after all runs taken before
        """
        waiting, taken = self._waiting, []
        for begin, end in runs:
            while waiting and waiting[0][0] < end:
                token = waiting.popleft()
                if token[1] > begin:
                    taken.append(token[2])
        return taken

    def take_next(self, size: int) -> list[_T]:
        """Return the entries of the next ``size`` characters, for a text that is not parsed into parts."""
        begin = self.num_shown
        self.num_shown += size
        return self.take([(begin, self.num_shown)])
