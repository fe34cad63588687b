"""Build the text of an output while its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.chat.detokenizer import Detokenizer
from paged_sdk.chat.stop_strings import StopStrings
from paged_sdk.chat.token_places import TokenPlaces
from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """Builds the text of one output up to its first stop string.

    The text depends on the tokens alone, not on where they are cut into pieces.

    So an engine that looks out for stop strings and a reader that shows the text need not exchange it.

    :param stops: non-empty strings
    :param continues_prompt: see :class:`Detokenizer`
    :param kept: see there
    :ivar is_stopped: a stop string is complete; nothing more is shown
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
        """Return the stop string that has ended the text; None: none has."""
        return None if self._stop_strings is None else self._stop_strings.found

    def leave_out(self, num_bytes: int) -> None:
        """Leave out the first bytes of the output, which repeat the end of the prompt. No token has come yet."""
        self._detokenizer.leave_out(num_bytes)

    def places(self) -> TokenPlaces:
        """Return what says where in the text the tokens stand. No token has come yet."""
        return self._detokenizer.places()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in the next tokens, and return the text that can be shown now."""
        return self._show(self._detokenizer.append(token_ids))

    def push_until_stopped(self, token_ids: Sequence[int]) -> int:
        """Take in the next tokens, up to the one that completes a stop string.

        :returns: how many of them belong to the output
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.push((token_id,))
            if self.is_stopped:
                return count
        return len(token_ids)

    def flush(self) -> str:
        """Return the end of the text, as far as it was held back."""
        text = self._show(self._detokenizer.flush())
        return text if self._stop_strings is None or self.is_stopped else text + self._stop_strings.flush()

    def _show(self, text: str) -> str:
        if self._stop_strings is not None:
            text, self.is_stopped = self._stop_strings.push(text)
        return text
