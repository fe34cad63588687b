"""Keeps the sequences out of the queue whose prompts show images that are still being encoded."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.kv.manager import KvManager
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue

__all__ = ["AwaitedImages", "ImageGate"]


class ImageGate(Protocol):
    """Has images encoded by somebody else, and says when a sequence's are there."""

    @property
    def has_ready(self) -> bool:
        """Say whether :meth:`take_ready` has something to return."""
        ...

    def ask(self, sequence: Sequence, start: int) -> bool:
        """Say whether all images of a sequence that have tokens from ``start`` on can be computed with. They are kept
        until it lets go of them, or else encoded now, and :meth:`take_ready` tells of it.
        """
        ...

    def take_ready(self) -> list[Sequence]:
        """Take out the sequences whose images have come since the last call."""
        ...

    def let_go(self, seq_id: int) -> None:
        """Forget that a sequence wanted images; nothing happens if it wanted none."""
        ...

    def note_step(self, num_texts: int) -> None:
        """Take in that a step is computed now, with the next token of so many texts."""
        ...


class AwaitedImages:
    """Moves sequences between the queue and those that await images. They take neither seats nor KV memory meanwhile,
    and are no candidates of any step; then they return to the place of their arrival.

    :param gate: has the images encoded; None: prompts have none
    """

    def __init__(self, gate: ImageGate | None, kv: KvManager, waiting: WaitingQueue) -> None:
        self._gate = gate
        self._kv = kv
        self._waiting = waiting
        self._held: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_all(self) -> bool:
        """Say whether sequences await images and none of these has come."""
        return bool(self._held) and self._gate is not None and not self._gate.has_ready

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence without KV wait, for its images where it has to."""
        if self._gate is None or sequence.request.media is None:
            self._wait(sequence)
            return
        start = self._kv.match(sequence.table, sequence.token_ids).num_tokens
        if self._gate.ask(sequence, start):
            self._wait(sequence)
        else:
            self._hold(sequence)

    def must_wait(self, sequence: Sequence, start: int) -> bool:
        """Say whether a sequence of the queue has to wait for images after all, since a prefix that held them is gone;
        it is taken out of the queue then.

        :param start: how many of its tokens have their KV
        """
        if self._gate is None or sequence.request.media is None or self._gate.ask(sequence, start):
            return False
        self._waiting.remove(sequence)
        self._hold(sequence)
        return True

    def take_ready(self) -> None:
        """Let the sequences wait in the queue whose images have come."""
        if self._gate is None or not self._held:
            return
        for sequence in self._gate.take_ready():
            if sequence in self._held:
                self._held.remove(sequence)
                self._wait(sequence)

    def note_step(self, num_texts: int) -> None:
        """Take in that a step is computed now, with the next token of so many texts."""
        if self._gate is not None and self._held:
            self._gate.note_step(num_texts)

    def forget(self, sequence: Sequence) -> None:
        """Let go of the images of a sequence that ends, and of the sequence."""
        self._held.discard(sequence)
        if self._gate is not None and sequence.request.media is not None:
            self._gate.let_go(sequence.seq_id)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)

    def _hold(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.AWAITING_IMAGES
        self._held.add(sequence)
