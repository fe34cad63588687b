"""Model the states of recurrent layers without tensors: a slot holds a mark of the whole history that it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_sdk.kv.manager import KvTable, StateCopy
from paged_sdk.kv.states import StatefulKvManager

__all__ = ["ShadowStates", "check_states"]


class ShadowStates:
    """Holds a mark per slot."""

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}
        self.num_copies = 0

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Do the copies of one step: all reads before all writes."""
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets)
        read = [self.marks[copy.src] for copy in copies]
        self.marks.update(zip(targets, read, strict=True))
        self.num_copies += len(copies)

    def advance(self, slot: int, marks: Sequence[int], start: int, end: int) -> None:
        """Compute tokens of a text, after checking that the slot holds the state before them.

        :param marks: of the text's tokens
        """
        if start:
            assert self.marks[slot] == marks[start - 1]
        self.marks[slot] = marks[end - 1]


def check_states(manager: StatefulKvManager, tables: Iterable[KvTable], *, num_running: int, num_kept: int) -> None:
    """Check that each slot is of one sequence, of one kept state, or free."""
    own = [table.state_slot for table in tables]
    assert sorted(own + manager._free) == list(range(num_running))
    kept = list(manager._kept.values())
    assert sorted(kept + manager._free_kept) == list(range(num_running, num_running + num_kept))
    for dst, copy in manager._copies.items():
        assert dst == copy.dst
        assert dst in (*own, *kept)
