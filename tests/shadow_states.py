"""Model the states of recurrent layers without tensors: a slot holds a mark of the whole history that it depends on,
and the marks to which drafts would take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.kv.manager import KvTable, StateCopy
from paged_sdk.kv.states import StatefulKvManager

__all__ = ["ShadowStates", "check_states"]


class ShadowStates:
    """Holds for each slot how many tokens its state has gone through, and its mark, followed by those of drafts.

    :param most_drafts: for how many drafts slots have room
    """

    def __init__(self, most_drafts: int) -> None:
        self.most_drafts = most_drafts
        self.marks: dict[int, tuple[int, Sequence[int]]] = {}
        self.num_behind = 0
        self.num_copies = 0

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Do the copies of one step: all reads before all writes."""
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets)
        read = [self.marks[copy.src] for copy in copies]
        self.marks.update(zip(targets, read, strict=True))
        self.num_copies += len(copies)

    def advance(self, slot: int, marks: Sequence[int], start: int, end: int, num_drafts: int) -> None:
        """Compute tokens of a text, after checking that the slot holds the state before them, or that drafts which it
        keeps lead there.

        :param marks: of the text's tokens
        """
        if start:
            passed, kept = self.marks[slot]
            assert passed <= start
            assert kept[start - passed] == marks[start - 1]
            self.num_behind += start > passed
        assert num_drafts <= self.most_drafts
        known_end = end - num_drafts
        self.marks[slot] = known_end, marks[known_end - 1 : end]


def check_states(manager: StatefulKvManager, tables: Iterable[KvTable], *, num_running: int, num_kept: int) -> None:
    """Check that each slot is of one sequence, of one kept state, or free."""
    own = [table.state_slot for table in tables]
    assert sorted(own + manager._free) == list(range(num_running))
    kept = list(manager._kept.values())
    assert sorted(kept + manager._free_kept) == list(range(num_running, num_running + num_kept))
    for dst, copy in manager._copies.items():
        assert dst == copy.dst
        assert dst in (*own, *kept)
