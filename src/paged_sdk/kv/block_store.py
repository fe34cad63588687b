"""Define how the content of blocks is kept outside the pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from paged_sdk.kv.manager import StoredBlock

__all__ = ["BlockReader", "BlockStore"]


class BlockReader(Protocol):
    """Reads the content of blocks that were cached once and may have left the pool."""

    @property
    def has_ready(self) -> bool:
        """Return whether :meth:`take_ready` has something to return."""
        ...

    def has(self, digest: bytes) -> bool:
        """Return whether a block's content seems to be stored, without reading it."""
        ...

    def read(self, digests: Sequence[bytes]) -> None:
        """Start to read blocks, in order, up to one that cannot be read. :meth:`take_ready` returns which were."""
        ...

    def take_ready(self) -> list[Collection[bytes]]:
        """Return which blocks have been read by the calls of :meth:`read` that have ended since the last call, in the
        order of these calls. Every call ends, whatever the disk does. The blocks' content is kept until it is put into
        the pool, before the next step.
        """
        ...


class BlockStore(BlockReader, Protocol):
    """Stores the content of blocks and reads it back, for an engine.

    :ivar on_ready: called on another thread when blocks have been read
    """

    on_ready: Callable[[], object]

    def store(self, blocks: Sequence[StoredBlock]) -> None:
        """Copy the content of full blocks out of the pool, to be stored."""
        ...

    def restore(self, blocks: Sequence[StoredBlock]) -> None:
        """Fill blocks of the pool with content that :meth:`take_ready` has announced, and free the memory of all that
        it has announced.
        """
        ...

    def forget(self, digests: Iterable[bytes]) -> None:
        """Remove blocks whose content is wrong."""
        ...

    def clear(self) -> None:
        """Remove all blocks of the engine's model."""
        ...
