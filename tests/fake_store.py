"""A store of blocks without files, which reads when it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from attrs import define, field

from paged_sdk.kv.manager import StoredBlock
from shadow_kv import ShadowKv


@define(eq=False)
class FakeStore:
    """Holds the marks of stored blocks.

    :ivar content: by hash, the marks of the block's cells
    :ivar to_read: the calls that have not been answered
    :ivar limit: the most blocks that one call reads
    """

    block_size: int
    limit: int = 2
    content: dict[bytes, list[int | None]] = field(factory=dict)
    to_read: deque[Sequence[bytes]] = field(factory=deque)
    ready: list[dict[bytes, list[int | None]]] = field(factory=list)
    taken: dict[bytes, list[int | None]] = field(factory=dict)
    num_reads: int = 0

    @property
    def has_ready(self) -> bool:
        return bool(self.ready)

    def has(self, digest: bytes) -> bool:
        return digest in self.content

    def read(self, digests: Sequence[bytes]) -> None:
        assert digests
        self.to_read.append(list(digests))

    def take_ready(self) -> list[Collection[bytes]]:
        ready, self.ready = self.ready, []
        for each in ready:
            self.taken |= each
        return list(ready)

    def answer(self) -> None:
        """Read what the first call has asked for."""
        if self.to_read:
            self.num_reads += 1
            found: dict[bytes, list[int | None]] = {}
            for digest in list(self.to_read.popleft())[: self.limit]:
                if digest not in self.content:
                    break
                found[digest] = self.content[digest]
            self.ready.append(found)

    def store(self, blocks: Sequence[StoredBlock], shadow: ShadowKv) -> None:
        for block in blocks:
            marks = [shadow.cells.get((block.block_id, offset)) for offset in range(self.block_size)]
            assert self.content.setdefault(block.digest, marks) == marks

    def restore(self, blocks: Sequence[StoredBlock], shadow: ShadowKv) -> None:
        for block in blocks:
            for offset, mark in enumerate(self.taken[block.digest]):
                assert mark is not None
                shadow.cells[block.block_id, offset] = mark
        self.taken.clear()
