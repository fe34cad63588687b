"""Keep all blocks of the KV cache: references, eviction, and which block has which hash."""

from __future__ import annotations

from paged_sdk.kv.block import Block
from paged_sdk.kv.free_list import FreeList
from paged_sdk.kv.manager import KvUsage

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out blocks and counts who refers to each.

    A block without references is in the free list. If it has a hash it keeps its content and can be found again until
    it is taken. Empty blocks are taken first, then those that were least recently held.

    :ivar blocks: every block, by id
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free_list = FreeList()
        for block in self.blocks:
            self._free_list.append(block)
        self._by_hash: dict[bytes, Block] = {}
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Return how many blocks can be taken: the free and the cached ones."""
        return len(self._free_list)

    @property
    def usage(self) -> KvUsage:
        total, available = len(self.blocks), len(self._free_list)
        return KvUsage(total=total, used=total - available, cached=self._num_cached, free=available - self._num_cached)

    def find(self, digest: bytes) -> Block | None:
        """Return the block with this hash, whether it is held or free; None if there is none."""
        return self._by_hash.get(digest)

    def take(self) -> Block:
        """Return a block to write to, with one reference, and forget what it held. One must be available."""
        block = self._free_list.popleft()
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None
            self._num_cached -= 1
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference to a block that was found by hash or is held already."""
        if block.ref_count == 0:
            self._free_list.remove(block)
            self._num_cached -= 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop a reference."""
        assert block.ref_count > 0, f"{block} is held by nobody"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.hash is None:
                self._free_list.prepend(block)
            else:
                self._free_list.append(block)
                self._num_cached += 1

    def publish(self, block: Block, digest: bytes) -> None:
        """Let a full, computed block be found by its hash, unless another block with the same content is known."""
        assert block.ref_count > 0, f"{block} is held by nobody"
        assert block.hash is None, f"{block} is published already"
        if digest not in self._by_hash:
            self._by_hash[digest] = block
            block.hash = digest

    def forget_hashes(self) -> None:
        """Forget all hashes, so that no block can be found any more."""
        for block in self._by_hash.values():
            block.hash = None
        self._by_hash.clear()
        self._num_cached = 0
