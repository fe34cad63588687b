"""Let a text that continues a prompt begin with tokens that go over the prompt's end.

A prompt may end where no token of a text that the model has seen ended: the last token of ``http:`` is ``:``, but
``http://`` has ``://`` in one. So the model has not seen ``:`` followed by ``//``, and continues it badly. Healing
takes the last tokens of a prompt back, and has the text begin with the same bytes, in whatever tokens (Lundberg, "The
Art of Prompt Design: Prompt Boundaries and Token Healing", 2023).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from paged_sdk.types.media import PromptMedia

if TYPE_CHECKING:  # numpy is loaded with a model that heals: nothing else of a model without weights needs it
    import numpy as np
    import numpy.typing as npt

__all__ = ["EncodedPrompt", "Healing", "TokenPrefixes"]


class TokenPrefixes:
    """Finds the tokens that begin with given bytes: 0.1 s to make of 49,000 tokens, microseconds to ask.

    :param tokens: id and bytes of every token that a text may have; those without bytes are left out
    """

    def __init__(self, tokens: Iterable[tuple[int, bytes]]) -> None:
        import numpy as np

        self._bytes_of = {token_id: data for token_id, data in tokens if data}
        ids = sorted(self._bytes_of, key=self._bytes_of.__getitem__)
        self._ids = np.array(ids, np.int64)
        self._sorted = [self._bytes_of[token_id] for token_id in ids]
        self._longest = max(map(len, self._sorted), default=0)

    def size_of(self, token_id: int) -> int:
        """Return how many bytes a token has: 0 for one that texts do not have."""
        return len(self._bytes_of.get(token_id, b""))

    def heal(self, token_ids: Sequence[int]) -> EncodedPrompt:
        """Take back the last tokens of a prompt: as many as a single longer token begins with, but never all."""
        data, healed = b"", EncodedPrompt(token_ids)
        for place in range(len(token_ids) - 1, 0, -1):
            data = self._bytes_of.get(token_ids[place], b"") + data
            if not self.size_of(token_ids[place]) or len(data) >= self._longest:
                break
            if self._has_longer(data):
                healed = EncodedPrompt(token_ids[:place], Healing(data, len(token_ids) - place, self))
        return healed

    def fitting(self, data: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens that begin with some bytes, and those that these bytes begin with."""
        import numpy as np

        begins = data.rstrip(b"\xff")  # the first bytes that come after all that begin with these
        after = begins[:-1] + bytes([begins[-1] + 1]) if begins else None
        longer = bisect_left(self._sorted, data), None if after is None else bisect_left(self._sorted, after)
        beginnings = [data[:size] for size in range(1, len(data))]
        shorter = [(bisect_left(self._sorted, token), bisect_right(self._sorted, token)) for token in beginnings]
        return np.concatenate([self._ids[first:end] for first, end in (longer, *shorter)])

    def _has_longer(self, data: bytes) -> bool:
        place = bisect_right(self._sorted, data)
        return place < len(self._sorted) and self._sorted[place].startswith(data)


@frozen(eq=False)
class Healing:
    """Says with which bytes a text has to begin.

    :ivar data: the end of its prompt, at least one byte; it is not shown again
    :ivar num_tokens: how many tokens of the prompt it was
    """

    data: bytes
    num_tokens: int
    prefixes: TokenPrefixes


@frozen(eq=False)
class EncodedPrompt:
    """Holds a prompt.

    :ivar token_ids: its tokens, without those that were taken back
    :ivar healing: with what its text has to begin then; None: nothing was taken back
    :ivar media: its images; None: it has none
    """

    token_ids: Sequence[int]
    healing: Healing | None = None
    media: PromptMedia | None = None
