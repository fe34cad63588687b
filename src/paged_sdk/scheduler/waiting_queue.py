"""Orders the waiting sequences by priority and arrival, and keeps any from being passed for ever."""

from __future__ import annotations

from bisect import insort
from itertools import chain, islice

from paged_sdk.scheduler.sequence import Sequence

__all__ = ["MAX_TIMES_PASSED", "WaitingQueue", "is_overdue", "rank"]

MAX_TIMES_PASSED = 16
"""After this many later requests were admitted, the oldest waiting request of a priority goes first, whatever the
priorities of others: few enough that small prompts do not starve a large one, enough that they fill gaps in memory."""


def is_overdue(sequence: Sequence) -> bool:
    """Return whether the sequence has been passed so often that it goes first."""
    return sequence.times_passed >= MAX_TIMES_PASSED


def rank(sequence: Sequence) -> tuple[bool, int, float, int]:
    """Return the sort key of a sequence: the smallest is admitted first and preempted last."""
    return (not is_overdue(sequence), -sequence.request.options.priority, sequence.request.arrival, sequence.seq_id)


def _age(sequence: Sequence) -> tuple[float, int]:
    return (sequence.request.arrival, sequence.seq_id)


class WaitingQueue:
    """Keeps the sequences without KV, ordered by priority, then by arrival.

    A preempted sequence returns to the place of its arrival.
    """

    def __init__(self) -> None:
        self._levels: dict[int, list[Sequence]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, sequence: Sequence) -> None:
        insort(self._levels.setdefault(sequence.request.options.priority, []), sequence, key=_age)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended or was admitted."""
        level = self._levels[sequence.request.options.priority]
        level.remove(sequence)
        if not level:
            del self._levels[sequence.request.options.priority]
        self._length -= 1

    def candidates(self, limit: int) -> list[Sequence]:
        """Return the first ``limit`` sequences in the order of admission."""
        levels = [self._levels[priority] for priority in sorted(self._levels, reverse=True)]
        overdue = sorted((level[0] for level in levels if is_overdue(level[0])), key=rank)
        in_turn = (sequence for level in levels for sequence in level if sequence not in overdue)
        return list(islice(chain(overdue, in_turn), limit))

    def count_passed_by(self, admitted: Sequence) -> None:
        """Count that ``admitted`` has passed the older sequences at the head of each priority.

        Only heads count, so many old sequences of low priority go first one at a time, not all at once.
        """
        for level in self._levels.values():
            if _age(level[0]) < _age(admitted):
                level[0].times_passed += 1
