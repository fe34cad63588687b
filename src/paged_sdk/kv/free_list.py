"""List the blocks that nobody holds, in the order in which they will be taken."""

from __future__ import annotations

from collections.abc import Iterator

from paged_sdk.kv.block import Block

__all__ = ["FreeList"]


class FreeList:
    """Links the free blocks in a doubly linked list through the blocks themselves.

    It takes O(1) at both ends, and in the middle too: a prefix hit on a free block takes that block out.
    """

    __slots__ = ("_length", "_sentinel")

    def __init__(self) -> None:
        # A sentinel before the first and after the last block, so that no operation has to handle an empty list.
        self._sentinel = Block(-1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Go from the block that is taken next to the one that is taken last."""
        block = self._sentinel.next
        while block is not self._sentinel:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Add a block to be taken last."""
        self._insert(self._sentinel.prev, block, self._sentinel)

    def prepend(self, block: Block) -> None:
        """Add a block to be taken next."""
        self._insert(self._sentinel, block, self._sentinel.next)

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is."""
        assert block.next is not block, f"{block} is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._length -= 1

    def popleft(self) -> Block:
        """Take the next block. There must be one."""
        block = self._sentinel.next
        self.remove(block)
        return block

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.next is block, f"{block} is in the free list already"
        block.prev, block.next = before, after
        before.next = after.prev = block
        self._length += 1
