"""Stores blocks of the KV cache on threads of their own, and reads them back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Final

from attrs import field, frozen

from paged_sdk.kv.manager import StoredBlock
from paged_sdk.logs import get_logger
from paged_sdk.runner.block_content import BlockContent, BlockCopies, BlockMemory
from paged_sdk.runner.block_files import BlockFiles
from paged_sdk.runner.device import is_lack_of_memory
from paged_sdk.system.threads import thread_must_start

__all__ = ["StoredBlocks"]

_log = get_logger(__name__)

_MOST_UNWRITTEN: Final = 1 << 28
"""Memory for blocks that are being written: 256 MiB. Where the disk is slower than the model, further ones are not
stored."""
_MOST_UNUSED: Final = 1 << 28
"""Memory for blocks that have been read and are not in the pool yet: 256 MiB."""
_MOST_PER_READ: Final = 1 << 26
"""The most bytes that are read before a sequence returns to the queue, 64 MiB; then it waits for the rest."""
_PAUSE_SECONDS: Final = 60.0
"""How long nothing is stored after the system has refused to write."""
_MOST_SECONDS: Final = 10.0
"""How long the disk may take for one block. After that, all blocks are computed until it answers. The slowest disks
read a block within a second."""
_CLOSE_SECONDS: Final = 10.0
"""How long closing waits for a disk that does not answer."""


@frozen(eq=False)
class _Write:
    """Holds blocks to write.

    :ivar digests: their hashes, in the order of their places in the memory
    :ivar files: where to
    """

    digests: Sequence[bytes]
    copies: BlockCopies
    num_bytes: int
    files: BlockFiles


@frozen(eq=False)
class _ReadBlocks:
    """Holds blocks that have been read.

    :ivar places: the place of each in the memory
    :ivar memory: None: there are none
    """

    places: dict[bytes, int] = field(factory=dict)
    memory: BlockMemory | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.num_bytes


class StoredBlocks:
    """Implements :class:`~paged_sdk.kv.block_store.BlockStore` by files.

    The engine's thread copies blocks out of the pool and into it; two other threads write and read files. Their errors
    do not reach the engine: a block that cannot be read is computed, and one that cannot be written is not stored.

    :param files: keeps the content
    :param content: the pool's blocks
    :ivar on_ready: called on the reading thread when blocks have been read
    """

    def __init__(self, files: BlockFiles, content: BlockContent) -> None:
        self.on_ready: Callable[[], object] = lambda: None
        self._files = files
        self._content: BlockContent | None = content
        self._sizes = content.sizes
        self._changed = threading.Condition()
        self._to_read: deque[Sequence[bytes]] = deque()
        self._reading: Sequence[bytes] | None = None  # the call that the reading thread answers
        self._read_since = self._write_since = inf  # when the file in work was begun, in monotonic seconds
        self._ready: list[_ReadBlocks] = []
        self._taken: list[_ReadBlocks] = []  # announced to the scheduler
        self._num_unused = 0  # bytes of both
        self._num_clears = 0
        self._to_write: deque[_Write] = deque()
        self._unwritten: dict[bytes, _Write] = {}
        self._num_unwritten = 0  # bytes
        self._paused_until = 0.0
        self._is_closed = False
        # Daemons, so that an application that forgets to close the model can exit.
        self._reader = threading.Thread(target=self._read_all, name="paged-sdk block reader", daemon=True)
        self._writer = threading.Thread(target=self._write_all, name="paged-sdk block writer", daemon=True)

    def start(self) -> None:
        """Start the threads.

        :raises EngineError: the system gives this process no more threads
        """
        with thread_must_start("for KV blocks to be stored on"):
            self._reader.start()
            self._writer.start()

    # On the engine's thread

    @property
    def has_ready(self) -> bool:
        """Implement :attr:`BlockReader.has_ready`. Calls that the disk does not answer are ready after some seconds."""
        return bool(self._ready) or (
            self._is_overdue(self._read_since) and (self._reading is not None or bool(self._to_read))
        )

    def has(self, digest: bytes) -> bool:
        """Implement :meth:`BlockReader.has`. A disk that does not answer has nothing: asking it might block."""
        if self._is_overdue(min(self._read_since, self._write_since)):
            return False
        return self._files.has(digest)

    def read(self, digests: Sequence[bytes]) -> None:
        """Implement :meth:`BlockReader.read`."""
        with self._changed:
            self._to_read.append(digests)
            self._changed.notify_all()

    def take_ready(self) -> list[Collection[bytes]]:
        """Implement :meth:`BlockReader.take_ready`."""
        with self._changed:
            if self._is_overdue(self._read_since):
                self._give_up_reading()
            ready, self._ready = self._ready, []
        self._taken += ready
        return [each.places for each in ready]

    def restore(self, blocks: Sequence[StoredBlock]) -> None:
        """Implement :meth:`BlockStore.restore`."""
        if not self._taken:
            return
        for each in self._taken:
            wanted = [block for block in blocks if block.digest in each.places]
            if each.memory is not None and wanted and self._content is not None:
                places = [each.places[block.digest] for block in wanted]
                self._content.copy_in([block.block_id for block in wanted], each.memory, places)
        self._drop_taken()

    def store(self, blocks: Sequence[StoredBlock]) -> None:
        """Copy full blocks out of the pool, to be written; none while too many wait."""
        new = [block for block in blocks if block.digest not in self._unwritten]
        num_bytes = len(new) * sum(self._sizes)
        is_full = self._num_unwritten and self._num_unwritten + num_bytes > _MOST_UNWRITTEN
        if not new or is_full or self._content is None or time.monotonic() < self._paused_until:
            return
        try:
            copies = self._content.copy_out([block.block_id for block in new])
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            return
        write = _Write([block.digest for block in new], copies, num_bytes, self._files)
        with self._changed:
            self._unwritten.update(dict.fromkeys(write.digests, write))
            self._num_unwritten += num_bytes
            self._to_write.append(write)
            self._changed.notify_all()

    def forget(self, digests: Iterable[bytes]) -> None:
        """Remove blocks whose content is wrong."""
        digests = list(digests)
        with self._changed:
            for digest in digests:
                self._unwritten.pop(digest, None)
            self._drop_reads()  # they may have read some of these
        for digest in digests:
            self._files.remove(digest)

    def clear(self) -> None:
        """Remove all blocks of this model."""
        self._drop_all()
        self._files.clear()

    def let_go_of_pool(self) -> None:
        """Drop the references to the pool, and what is being read for it. Nothing is stored until :meth:`replace`.

        Blocks that wait are still written, for some seconds at most: those of the next pool may have the same hashes.
        """
        if self._writer.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._unwritten, _CLOSE_SECONDS)
        self._drop_all()
        self._drop_taken()
        self._content = None

    def replace(self, files: BlockFiles, content: BlockContent) -> None:
        """Store the blocks of another pool, which may be of other weights. The old files stay."""
        self._drop_all()
        self._files, self._content, self._sizes = files, content, content.sizes

    def close(self) -> None:
        """End the threads and free their memory. Blocks that wait are still written, for some seconds at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in (self._reader, self._writer):
            if thread.is_alive():
                thread.join(_CLOSE_SECONDS)
        self._drop_all()
        self._drop_taken()
        self._content = None

    def _drop_all(self) -> None:
        """Make all that waits or is being read or written come to nothing."""
        with self._changed:
            self._unwritten.clear()
            self._drop_reads()

    def _drop_reads(self) -> None:
        """Make all that is being read come to nothing, with the lock held."""
        self._num_clears += 1
        self._num_unused -= sum(each.num_bytes for each in self._ready)
        self._ready = [_ReadBlocks() for _ in self._ready]  # the scheduler awaits an answer to each call

    def _drop_taken(self) -> None:
        """Free the memory of blocks that were announced."""
        taken, self._taken = self._taken, []
        with self._changed:
            self._num_unused -= sum(each.num_bytes for each in taken)
            self._changed.notify_all()

    def _is_overdue(self, since: float) -> bool:
        return time.monotonic() - since > _MOST_SECONDS

    def _give_up_reading(self) -> None:
        """Answer all calls with nothing, with the lock held. The thread may never return from the disk."""
        unanswered = [*self._to_read] if self._reading is None else [self._reading, *self._to_read]
        if unanswered:
            _log.warning("The disk with KV blocks does not answer: until it does, they are computed.")
        self._ready += [_ReadBlocks() for _ in unanswered]
        self._to_read.clear()
        self._reading = None

    # On the reading thread

    def _read_all(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (not self._to_read or self._num_unused > _MOST_UNUSED):
                    self._changed.wait()
                if self._is_closed:
                    return
                self._reading = digests = self._to_read.popleft()
                files, sizes = self._files, self._sizes
                num_clears = self._num_clears
            found = _ReadBlocks()
            try:
                found = self._read(digests, files, sizes)
            except BaseException:  # if it ended the thread, requests would wait for ever
                _log.exception("KV blocks cannot be read: they are computed")
            with self._changed:
                self._read_since = inf
                if self._reading is not digests:  # answered meanwhile
                    del found
                    continue
                self._reading = None
                if num_clears != self._num_clears:
                    found = _ReadBlocks()
                self._num_unused += found.num_bytes
                self._ready.append(found)
            del found
            self.on_ready()

    def _read(self, digests: Sequence[bytes], files: BlockFiles, sizes: Sequence[int]) -> _ReadBlocks:
        """Read blocks up to one that cannot be read, or to a limit.

        :param sizes: bytes of a block in each tensor of the pool
        """
        wanted = digests[: max(1, _MOST_PER_READ // sum(sizes))]
        memory = BlockMemory.empty(len(wanted), sizes)
        places: dict[bytes, int] = {}
        for place, digest in enumerate(wanted):
            self._read_since = time.monotonic()
            if not files.read(digest, memory.pieces(place)):
                break
            places[digest] = place
        return _ReadBlocks(places, memory) if places else _ReadBlocks()

    # On the writing thread

    def _write_all(self) -> None:
        while (write := self._next_write()) is not None:
            try:
                self._write(write)
            except OSError as error:
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
                reason = error.strerror or error
                _log.warning("KV blocks cannot be stored: %s. It is tried again in %d s.", reason, _PAUSE_SECONDS)
            except BaseException:
                self._paused_until = inf
                _log.exception("KV blocks cannot be stored: the engine continues without")
            finally:
                with self._changed:
                    self._write_since = inf
                    for digest in write.digests:
                        if self._is_awaited(write, digest):
                            del self._unwritten[digest]
                    self._num_unwritten -= write.num_bytes
                    self._changed.notify_all()
                del write

    def _next_write(self) -> _Write | None:
        with self._changed:
            while not self._to_write:
                if self._is_closed:
                    return None
                self._changed.wait()
            return self._to_write.popleft()

    def _write(self, write: _Write) -> None:
        memory = write.copies.wait()
        for place, digest in enumerate(write.digests):
            if not self._is_awaited(write, digest):
                continue
            self._write_since = time.monotonic()
            write.files.write(digest, memory.pieces(place))
            if not self._is_awaited(write, digest):  # forgotten meanwhile
                write.files.remove(digest)

    def _is_awaited(self, write: _Write, digest: bytes) -> bool:
        """Return whether a block is to be written with this content: after it was forgotten, there may be another."""
        return self._unwritten.get(digest) is write
