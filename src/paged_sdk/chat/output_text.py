"""Build the text of an output incrementally, up to its first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.chat.detokenizer import Detokenizer
from paged_sdk.chat.stop_strings import StopStrings
from paged_sdk.chat.token_spans import TokenSpans
from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """Builds the text of one output up to its first stop string.

    The text depends only on the tokens, not on how they are grouped. So the engine, which looks for stop strings, and
    the reader, which returns the text, can each build it, without exchanging text.

    :param stops: stop strings, not empty
    :param continues_prompt: see :class:`Detokenizer`
    :param kept: see :class:`Detokenizer`
    :ivar is_stopped: whether a stop string is complete, so that no more text follows
    """

    __slots__ = ("_detokenizer", "_stop_strings", "is_stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        *,
        continues_prompt: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues_prompt=continues_prompt, kept=kept)
        stops = tuple(stops)
        self._stop_strings = StopStrings(stops) if stops else None
        self.is_stopped: bool = False

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that has ended the text, or None."""
        return None if self._stop_strings is None else self._stop_strings.found

    def leave_out(self, num_bytes: int) -> None:
        """Drop the first bytes of the output, which repeat the end of the prompt. Call this before the first token."""
        self._detokenizer.leave_out(num_bytes)

    def token_spans(self) -> TokenSpans:
        """Return an object that maps tokens to characters of the text. Call this before the first token."""
        return self._detokenizer.token_spans()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete now."""
        return self._show(self._detokenizer.append(token_ids))

    def push_until_stopped(self, token_ids: Sequence[int]) -> int:
        """Add tokens, up to the one that completes a stop string.

        :returns: how many of the tokens belong to the output
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.push((token_id,))
            if self.is_stopped:
                return count
        return len(token_ids)

    def flush(self) -> str:
        """Return the text that was held back, as the output has ended."""
        text = self._show(self._detokenizer.flush())
        return text if self._stop_strings is None or self.is_stopped else text + self._stop_strings.flush()

    def _show(self, text: str) -> str:
        if self._stop_strings is not None:
            text, self.is_stopped = self._stop_strings.push(text)
        return text
