"""Holds the sequences that have KV memory, and preempts those of low rank for those of higher rank."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Final

from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvManager
from paged_sdk.scheduler.awaited_inputs import AwaitedInputs
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.pins import Pins
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import rank

__all__ = ["RunningSequences"]

_LONG: Final = CacheKey(b"rope:long")
"""Tells the KV of sequences beyond the trained context from the KV of the same tokens within it."""


class RunningSequences:
    """Holds the running sequences by rank (overdue, priority, arrival).

    A sequence that needs memory preempts the last by rank, which loses its KV and waits again. The first is never
    preempted, since it may take the whole memory; if it is alone, pinned sequences make room for it, the latest first.

    During iteration, sequences may be removed from the end.

    :param awaited: receives sequences that lose their KV
    :param pins: the pinned sequences
    :ivar num_preemptions: how often a sequence has lost its KV to others
    """

    def __init__(self, config: EngineConfig, kv: KvManager, awaited: AwaitedInputs, pins: Pins) -> None:
        self._config = config
        self._kv = kv
        self._awaited = awaited
        self._pins = pins
        self._sequences: list[Sequence] = []
        self.num_preemptions: int = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has KV."""
        insort(self._sequences, sequence, key=rank)

    def fork(self, row: ScheduledSequence) -> list[Sequence]:
        """Return one sequence per sample of a row: the row's own, then independent forks of it."""
        sequence = row.sequence
        siblings = [
            sequence.fork(choice, self._kv.fork(sequence.table, sequence.num_computed_tokens))
            for choice in range(1, row.num_samples)
        ]
        for sibling in siblings:
            self.add(sibling)
        sequence.num_choices = 1
        return [sequence, *siblings]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that no longer runs, and free its memory."""
        self._sequences.remove(sequence)
        self._kv.free(sequence.table, sequence.token_ids, sequence.num_computed_tokens)

    def pin(self, sequence: Sequence) -> bool:
        """Move a sequence whose prompt is computed to the pinned ones; if some of its KV cannot be found any more, back
        to the queue, and return False.
        """
        if not self._pins.hold(sequence):
            self.requeue(sequence)
            return False
        self._sequences.remove(sequence)
        self._awaited.forget(sequence)  # others need the memory; if it is computed again, they are encoded again
        return True

    def recompute_pins(self, *, only_lost: bool) -> None:
        """Move pinned sequences back to the queue.

        :param only_lost: only those some of whose KV cannot be found any more
        """
        for sequence in list(self._pins):
            if not (only_lost and self._pins.still_holds(sequence)):
                self.requeue(sequence)

    def make_room(self, sequence: Sequence, start: int, num_wanted: int) -> int:
        """Get capacity for at most ``num_wanted`` more tokens of a sequence, and preempt sequences of lower rank if
        memory is short.

        :param start: how many of its tokens are scheduled already
        :returns: how many tokens there is capacity for; 0 if the sequence itself was the last by rank
        """
        while (
            num_granted := sequence.chunk_end_before(start + self._kv.grow(sequence.table, start, num_wanted)) - start
        ) <= 0:
            last = self._sequences[-1]
            if last is sequence and sequence.num_in_flight:
                break  # its sliding window may free blocks once the step in flight is updated
            if len(self) == 1:
                assert self._pins, f"{sequence} has the whole memory and no room"
                last = self._pins.latest
            self.preempt(last)
            if last is sequence:
                break
        return max(num_granted, 0)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's memory for others and requeue it."""
        self.requeue(sequence)
        self.num_preemptions += 1

    def requeue(self, sequence: Sequence) -> None:
        """Move a running or pinned sequence back to the queue, without KV."""
        if sequence.status is SequenceStatus.PINNED:
            self._pins.drop(sequence)
        else:
            self.remove(sequence)
        # A token in flight is lost; the same token will be sampled again.
        sequence.num_computed_tokens = sequence.num_scheduled = 0
        sequence.length = len(sequence.token_ids)
        sequence.epoch += 1
        self.queue(sequence)

    def queue(self, sequence: Sequence) -> None:
        """Queue a sequence without KV. Set the length up to which it can be scheduled, and what its KV depends on.

        A sequence within :attr:`EngineConfig.rope_switch` ends there for now: the next token needs all KV recomputed. A
        request that generates nothing needs KV for every token; otherwise the last generated token needs none.
        """
        end, switch = min(sequence.max_length, self._kv.max_sequence_tokens + 1), self._config.rope_switch
        if not sequence.request.generates:
            end = len(sequence.token_ids) + 1
        if switch is not None and not sequence.is_long:
            if len(sequence.token_ids) > switch:
                sequence.is_long = True
                sequence.table.depend_on(_LONG)
            else:
                end = min(end, switch + 1)
        sequence.end_length = end
        self._awaited.queue(sequence)

    def may_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence that has reached its end length can continue once its KV is recomputed."""
        is_short = self._config.rope_switch is not None and not sequence.is_long
        return is_short and sequence.length <= self._kv.max_sequence_tokens
