from __future__ import annotations

from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.waiting_queue import MAX_TIMES_PASSED, WaitingQueue, is_overdue, rank
from sequences import make_sequence


def waiting(seq_id: int, *, priority: int = 0, arrival: float | None = None) -> Sequence:
    return make_sequence(seq_id, priority=priority, arrival=arrival)


def order(queue: WaitingQueue, limit: int = 100) -> list[int]:
    return [sequence.seq_id for sequence in queue.candidates(limit)]


def test_priority_then_arrival_then_id() -> None:
    queue = WaitingQueue()
    for sequence in (
        waiting(0, arrival=5.0),
        waiting(1, priority=-1, arrival=0.0),
        waiting(2, arrival=4.0),
        waiting(4, priority=3, arrival=9.0),
        waiting(3, arrival=4.0),
    ):
        queue.add(sequence)
    assert order(queue) == [4, 2, 3, 0, 1]
    assert order(queue, 2) == [4, 2]
    assert len(queue) == 5
    assert bool(queue)


def test_removing_the_last_of_a_priority() -> None:
    queue, sequence = WaitingQueue(), waiting(0, priority=7)
    queue.add(sequence)
    queue.remove(sequence)
    assert order(queue) == []
    assert not queue
    queue.add(sequence)
    assert order(queue) == [0]


def test_only_the_head_of_each_priority_counts_those_that_came_later() -> None:
    queue = WaitingQueue()
    low, low_second, high, late = waiting(0), waiting(1), waiting(3, priority=1), waiting(9, priority=-1)
    for sequence in (low, low_second, high, late):
        queue.add(sequence)
    queue.count_passed_by(waiting(5, priority=2))
    queue.count_passed_by(waiting(2))
    assert [s.times_passed for s in (low, low_second, high, late)] == [2, 0, 1, 0]


def test_who_is_overdue_goes_first_whatever_the_priorities() -> None:
    queue = WaitingQueue()
    low, lower, high = waiting(0), waiting(1, priority=-1), waiting(2, priority=5)
    for sequence in (low, lower, high):
        queue.add(sequence)
    low.times_passed = lower.times_passed = MAX_TIMES_PASSED
    assert is_overdue(low)
    assert not is_overdue(high)
    # Among the overdue, priority and arrival count again.
    assert order(queue) == [0, 1, 2]
    assert sorted([high, lower, low], key=rank) == [low, lower, high]
