"""Joins the sets of sequences that wait outside the queue for what their prompts need."""

from __future__ import annotations

from paged_sdk.kv.block_store import BlockReader
from paged_sdk.kv.manager import KvManager, Prefix
from paged_sdk.scheduler.awaited_blocks import AwaitedBlocks
from paged_sdk.scheduler.awaited_images import AwaitedImages, ImageGate
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue

__all__ = ["AwaitedInputs"]


class AwaitedInputs:
    """Keeps sequences out of the queue while stored blocks of their prompts are read, or images encoded. They return to
    the place of their arrival.

    :param images: encodes the images of prompts; None: prompts have no images
    :param store: reads cached blocks that have left the pool; None: nothing is stored
    """

    def __init__(
        self, images: ImageGate | None, store: BlockReader | None, kv: KvManager, waiting: WaitingQueue
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._images = AwaitedImages(images, kv, waiting)
        self._blocks = AwaitedBlocks(store, kv, waiting)

    def __len__(self) -> int:
        return len(self._images) + len(self._blocks)

    @property
    def num_for_images(self) -> int:
        """Return how many sequences wait for images."""
        return len(self._images)

    @property
    def num_seats(self) -> int:
        """Return how many seats are kept for sequences that wait for blocks."""
        return self._blocks.num_seats

    @property
    def num_blocks(self) -> int:
        """Return how many blocks are kept for sequences that wait for blocks."""
        return self._blocks.num_blocks

    @property
    def none_ready(self) -> bool:
        """Return whether sequences are waiting, and nothing is ready that any of them waits for."""
        return all(each.none_ready for each in (self._images, self._blocks) if each) if len(self) else False

    def queue(self, sequence: Sequence) -> None:
        """Put a sequence without KV into the queue, or hold it until its images are encoded."""
        has_images = sequence.request.media is not None
        if has_images and self._blocks.are_stored(sequence, self._kv.match(sequence.table, sequence.token_ids)):
            # Images in stored blocks need no encoding: those in other blocks are asked for on admission.
            sequence.status = SequenceStatus.WAITING
            self._waiting.add(sequence)
        else:
            self._images.queue(sequence)

    def must_wait(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Return whether a queued sequence, which could be admitted otherwise, has to wait. If so, it is taken out of
        the queue.

        :param prefix: what the pool has of it
        """
        return self._blocks.must_wait(sequence, prefix) or self._images.must_wait(sequence, prefix.num_tokens)

    def take_ready(self) -> None:
        """Put sequences that have what they waited for back into the queue."""
        self._images.take_ready()
        self._blocks.take_ready()

    def note_step(self, num_decodes: int) -> None:
        """Note that a step begins in which ``num_decodes`` sequences decode."""
        self._images.note_step(num_decodes)

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence is admitted."""
        self._blocks.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ends, and release what was made for it."""
        self._images.forget(sequence)
        self._blocks.forget(sequence)
