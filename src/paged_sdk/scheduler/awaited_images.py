"""Keeps sequences out of the queue while images of their prompts are being encoded."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.kv.manager import KvManager
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue

__all__ = ["AwaitedImages", "ImageGate"]


class ImageGate(Protocol):
    """Requests the encoding of images, and reports when all images of a sequence are ready."""

    @property
    def has_ready(self) -> bool:
        """Return whether :meth:`take_ready` has something to return."""
        ...

    def ask(self, sequence: Sequence, start: int) -> bool:
        """Return whether all images that the sequence needs from token ``start`` on are ready.

        If so, they are kept until :meth:`let_go`. If not, the missing ones are queued for encoding, and
        :meth:`take_ready` returns the sequence when they are done.
        """
        ...

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose images have become ready since the last call."""
        ...

    def let_go(self, seq_id: int) -> None:
        """Release the images of a sequence; ids without images are ignored."""
        ...

    def note_step(self, num_decodes: int) -> None:
        """Note that a step begins in which ``num_decodes`` sequences decode."""
        ...


class AwaitedImages:
    """Moves sequences between the queue and the set that waits for images. In that set they take neither seats nor KV
    memory and are not considered by any step; afterwards they return to the queue at the place of their arrival.

    :param gate: encodes the images; None: prompts have no images
    """

    def __init__(self, gate: ImageGate | None, kv: KvManager, waiting: WaitingQueue) -> None:
        self._gate = gate
        self._kv = kv
        self._waiting = waiting
        self._held: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def none_ready(self) -> bool:
        """Return whether sequences are waiting for images and none of them is ready."""
        return bool(self._held) and self._gate is not None and not self._gate.has_ready

    def queue(self, sequence: Sequence) -> None:
        """Put a sequence without KV into the queue, or hold it until its images are encoded."""
        if self._gate is None or sequence.request.media is None:
            self._wait(sequence)
            return
        start = self._kv.match(sequence.table, sequence.token_ids).num_tokens
        if self._gate.ask(sequence, start):
            self._wait(sequence)
        else:
            self._hold(sequence)

    def must_wait(self, sequence: Sequence, start: int) -> bool:
        """Return whether a queued sequence has to wait for images after all, because the cached prefix that covered
        them is gone. If so, the sequence is taken out of the queue.

        :param start: how many leading tokens of the sequence have KV
        """
        if self._gate is None or sequence.request.media is None or self._gate.ask(sequence, start):
            return False
        self._waiting.remove(sequence)
        self._hold(sequence)
        return True

    def take_ready(self) -> None:
        """Put sequences whose images are ready back into the queue."""
        if self._gate is None or not self._held:
            return
        for sequence in self._gate.take_ready():
            if sequence in self._held:
                self._held.remove(sequence)
                self._wait(sequence)

    def note_step(self, num_decodes: int) -> None:
        """Note that a step begins in which ``num_decodes`` sequences decode."""
        if self._gate is not None and self._held:
            self._gate.note_step(num_decodes)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ends, and release its images."""
        self._held.discard(sequence)
        if self._gate is not None and sequence.request.media is not None:
            self._gate.let_go(sequence.seq_id)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)

    def _hold(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.AWAITING_IMAGES
        self._held.add(sequence)
