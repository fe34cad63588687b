"""Keeps sequences out of the queue while stored blocks of their prompts are read back into the pool."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from attrs import field, frozen

from paged_sdk.kv.block_store import BlockReader
from paged_sdk.kv.manager import KvManager, Prefix
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue

__all__ = ["AwaitedBlocks"]


@frozen(eq=False)
class _Read:
    """Describes blocks that are being read.

    :ivar digests: the hashes of a sequence's first blocks, up to the last one that is read
    :ivar sequences: those that wait for the blocks; the first asked for them
    """

    digests: Sequence_[bytes]
    sequences: list[Sequence] = field(factory=list)


class AwaitedBlocks:
    """Moves sequences out of the queue while the blocks that follow their cached prefix are read from a store, and back
    to the place of their arrival once the pool has the blocks. Meanwhile they have no KV, and a seat and memory are
    kept for them.

    A sequence begins to read when it could be admitted, not when it arrives: blocks that are read long before they are
    used would displace others from the pool.

    :param store: reads blocks; None: nothing is stored
    """

    def __init__(self, store: BlockReader | None, kv: KvManager, waiting: WaitingQueue) -> None:
        self._store = store
        self._kv = kv
        self._waiting = waiting
        self._reads: dict[bytes, _Read] = {}  # by the hash of the first block, in the order of the calls
        self._held: set[Sequence] = set()
        # By sequence, how many blocks it had when it last looked for more: without any since, it does not wait again.
        self._looked_at: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def none_ready(self) -> bool:
        """Return whether sequences are waiting for blocks and none has been read."""
        return bool(self._held) and self._store is not None and not self._store.has_ready

    @property
    def num_seats(self) -> int:
        """Return how many sequences the waiting ones are going to be, choices included."""
        return sum(sequence.num_choices for sequence in self._held)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks the waiting sequences need, counted as if they had none in common."""
        return sum(len(sequence.table.hashes) + sequence.num_choices for sequence in self._held)

    def are_stored(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Return whether the block after a queued sequence's cached prefix is stored."""
        if self._store is None or prefix.awaited:
            return False
        following = self._kv.hashes_after(sequence.table, sequence.token_ids, prefix)
        return bool(following) and (following[0] in self._reads or self._store.has(following[0]))

    def must_wait(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Return whether a queued sequence has to wait for stored blocks. If so, it is taken out of the queue.

        :param prefix: what the pool has of it
        """
        if self._store is None or self._looked_at.get(sequence, -1) >= len(prefix.ids):
            return False
        self._looked_at[sequence] = len(prefix.ids)
        if not self.are_stored(sequence, prefix):
            return False
        following = self._kv.hashes_after(sequence.table, sequence.token_ids, prefix)
        read = self._reads.get(following[0])
        if read is None:
            every = sequence.table.hashes[: len(prefix.ids) + len(following)]
            read = self._reads[following[0]] = _Read(every)
            self._store.read(following)
        read.sequences.append(sequence)
        self._waiting.remove(sequence)
        sequence.status = SequenceStatus.AWAITING_BLOCKS
        self._held.add(sequence)
        return True

    def take_ready(self) -> None:
        """Give the blocks that have been read to the pool, and put their sequences back into the queue."""
        if self._store is None or not self._reads:
            return
        for stored in self._store.take_ready():
            read = self._reads.pop(next(iter(self._reads)))
            self._kv.restore(read.digests, stored)
            for sequence in read.sequences:
                if sequence in self._held:
                    self._held.remove(sequence)
                    sequence.status = SequenceStatus.WAITING
                    self._waiting.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ends or is admitted. Blocks that are being read for it still come into the pool."""
        self._held.discard(sequence)
        self._looked_at.pop(sequence, None)
