"""Map parts of an output's text to the tokens that they come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from paged_sdk.chat.output_bytes import OutputBytes

__all__ = ["TextTokens", "TokenSpans"]

_T = TypeVar("_T")


class TokenSpans:
    """Maps each token of an output to the characters of the text that it contributes to.

    A character whose bytes are spread over several tokens belongs to each of them. The text is that of
    :class:`~paged_sdk.chat.detokenizer.Detokenizer`, which makes these objects.

    :param output: decodes the output, before its first token
    """

    __slots__ = ("_num_characters", "_output")

    def __init__(self, output: OutputBytes) -> None:
        self._output = output
        self._num_characters = 0

    def add(self, token_id: int) -> tuple[int, int]:
        """Add the next token. Return the index of its first character, and the index after its last one: both are the
        same if it has no text."""
        data = self._output.bytes_of((token_id,))
        if not data:
            return self._num_characters, self._num_characters
        begin = max(self._end_after(data[:1]) - 1, 0)
        return begin, self._end_after(data[1:])

    def _end_after(self, data: bytes) -> int:
        """Decode bytes, and return the index after the character that the last byte belongs to."""
        self._num_characters += len(self._output.text_of(data))
        return self._num_characters + self._output.num_waiting


class TextTokens(Generic[_T]):
    """Keeps an entry for each token of an output, such as its logprobs, until the use of its text is known.

    :ivar num_shown: number of characters taken by :meth:`take_next`
    """

    __slots__ = ("_spans", "_waiting", "num_shown")

    def __init__(self, spans: TokenSpans) -> None:
        self._spans = spans
        self._waiting: deque[tuple[int, int, _T]] = deque()
        self.num_shown: int = 0

    def add(self, token_ids: Iterable[int], entries: Sequence[_T]) -> None:
        """Add tokens and their entries."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            begin, end = self._spans.add(token_id)
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
