"""Record the state of one block of the KV pool."""

from __future__ import annotations

__all__ = ["Block"]


class Block:
    """Records who holds one block of KV memory and what it contains.

    :ivar id: index into the device's cache tensors
    :ivar ref_count: number of block table entries that refer to the block; 0: it is in the free list
    :ivar hash: chain hash of its tokens, once it is full and computed; kept when ``ref_count`` drops to 0
    :ivar prev: previous block in the free list, which is taken earlier; the block itself when it is not in the list
    :ivar next: next block in the free list
    """

    __slots__ = ("hash", "id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id: int = block_id
        self.ref_count: int = 0
        self.hash: bytes | None = None
        self.prev: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.id}, ref_count={self.ref_count}, hash={self.hash.hex()[:8] if self.hash else None})"
