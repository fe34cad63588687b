"""Hold all blocks of the KV cache: reference counts, eviction order, and lookup by hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paged_sdk.kv.block import Block
from paged_sdk.kv.manager import KvUsage

__all__ = ["BlockPool", "FreeList"]


class FreeList:
    """Links the free blocks in a doubly linked list through the blocks themselves.

    Every operation takes O(1), also in the middle: a prefix hit on a free block removes that block.

    :param blocks: the list's first blocks, in no list yet
    """

    __slots__ = ("_length", "_sentinel")

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        # The sentinel is both before the first block and after the last, so no operation has to handle an empty list.
        self._sentinel = last = Block(-1)
        for block in blocks:  # appending each took most of the time that making a pool does
            last.next, block.prev = block, last
            last = block
        last.next, self._sentinel.prev = self._sentinel, last
        self._length = len(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Iterate in the order in which blocks are taken."""
        block = self._sentinel.next
        while block is not self._sentinel:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Add a block at the end, to be taken last."""
        self._insert(self._sentinel.prev, block, self._sentinel)

    def prepend(self, block: Block) -> None:
        """Add a block at the front, to be taken next."""
        self._insert(self._sentinel, block, self._sentinel.next)

    def remove(self, block: Block) -> None:
        """Remove a block from anywhere in the list."""
        assert block.next is not block, f"{block} is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._length -= 1

    def popleft(self) -> Block:
        """Remove and return the first block. There must be one."""
        block = self._sentinel.next
        self.remove(block)
        return block

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.next is block, f"{block} is in the free list already"
        block.prev, block.next = before, after
        before.next = after.prev = block
        self._length += 1


class BlockPool:
    """Hands out blocks and counts references to them.

    A block without references is in the free list. If it has a hash, it keeps its content and can be hit until it is
    reused. Blocks without a hash are reused first, then the least recently released.

    :ivar blocks: every block, by id
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[Block] = [Block(block_id) for block_id in range(num_blocks)]
        self._free_list = FreeList(self.blocks)
        self._by_hash: dict[bytes, Block] = {}
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Return how many blocks can be taken: free and cached ones."""
        return len(self._free_list)

    @property
    def usage(self) -> KvUsage:
        total, available = len(self.blocks), len(self._free_list)
        return KvUsage(total=total, used=total - available, cached=self._num_cached, free=available - self._num_cached)

    def find(self, digest: bytes) -> Block | None:
        """Return the block with this hash, whether it is referenced or free; None if there is none."""
        return self._by_hash.get(digest)

    def take(self) -> Block:
        """Return a block to write to, with one reference, and drop its old hash. One must be available."""
        block = self._free_list.popleft()
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None
            self._num_cached -= 1
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference to a block that was found by hash or is referenced already."""
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
        """Make a full, computed block findable by its hash, unless another block already has that hash."""
        assert block.ref_count > 0, f"{block} is held by nobody"
        assert block.hash is None, f"{block} is published already"
        if digest not in self._by_hash:
            self._by_hash[digest] = block
            block.hash = digest

    def withdraw(self, digest: bytes) -> None:
        """Drop a hash, if a block has it, so that the block can no longer be hit."""
        block = self._by_hash.pop(digest, None)
        if block is None:
            return
        block.hash = None
        if block.ref_count == 0:
            self._num_cached -= 1
            self._free_list.remove(block)
            self._free_list.prepend(block)

    def forget_hashes(self) -> None:
        """Drop all hashes, so that no block can be hit."""
        for block in self._by_hash.values():
            block.hash = None
        self._by_hash.clear()
        self._num_cached = 0
