"""Says which tokens of a step's rows are drafts, for layers whose states cannot go back to before a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import mul

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["RowDrafts"]


@frozen
class RowDrafts:
    """Counts the drafts of each row of a step, and those of earlier steps that were right.

    A row leaves its sequence's state as it is before the drafts, and beside it what the layer reads of them. When it is
    known how many of them were right, the sequence's next row takes the state through these first.

    :ivar replayed: how many drafts of its sequence's last row each row takes the state through, before its own tokens
    :ivar earlier: how many drafts of its sequence's last row, which are drafts still, each row follows; one that
        follows any has drafts alone, and none are replayed
    :ivar new: how many of each row's last tokens are drafts
    """

    replayed: tuple[int, ...]
    earlier: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return these numbers, ``[3, num_rows]``."""
        return np.array((self.replayed, self.earlier, self.new), dtype=np.int64)

    @property
    def most(self) -> int:
        """Return for how many drafts of a sequence there has to be room; 0: there are none."""
        replayed, earlier, new = self.counts
        return int(np.maximum(replayed, earlier + new).max(initial=0))

    def part(self, rows: Sequence[bool], *, begins: Sequence[bool], ends: Sequence[bool]) -> RowDrafts:
        """Return the drafts of some tokens of the step. A row is not divided among its drafts.

        :param rows: for each row, whether it has any of these tokens
        :param begins: whether it has its first token; ``ends`` likewise, its last one
        """

        def selected(counts: Sequence[int], where: Sequence[bool]) -> tuple[int, ...]:
            return tuple(compress(map(mul, counts, where), rows))

        return RowDrafts(selected(self.replayed, begins), selected(self.earlier, begins), selected(self.new, ends))
