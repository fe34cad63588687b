"""Manage paged KV memory: block tables over one pool, with sharing by hash and by reference."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from paged_sdk.kv.block import Block
from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.kv.block_pool import BlockPool
from paged_sdk.kv.manager import KvCopy, KvTable, KvUsage, Prefix, StateCopy, StoredBlock

__all__ = ["KvCacheManager"]

OUT_OF_WINDOW_BLOCK = 0
"""Block table entry for a block outside every window. Any existing id would do: it is never read."""


class KvCacheManager:
    """Keeps the block tables of all sequences (a :class:`~paged_sdk.kv.manager.KvManager`).

    Of a table over ``ids``, with W the window and B the block size::

        | out of W  | within W                                         | | freed     | computed, full     | partly
        filled | capacity to write |           | published by hash  |     at most one block of it is shared, and copied
        before it is written 0           num_out_of_window    num_published                   len(ids)

    A block that another table refers to is never written: ``grow`` replaces it by a copy. A block with a hash is full,
    so it is never written.

    :param sliding_window: tokens that a query attends to, itself included, if every layer has a sliding window: the
        widest; blocks outside it are freed while the sequence runs
    :param records_published: whether :meth:`take_published` returns the blocks that have become full
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        sliding_window: int | None = None,
        records_published: bool = False,
    ) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._prefix_caching = prefix_caching
        self._window = sliding_window
        # A window that starts with a block's last token spans the most blocks.
        self._window_blocks = sys.maxsize if sliding_window is None else self._num_blocks(sliding_window - 1) + 1
        self._pending: dict[bytes, KvTable] = {}
        self._copies: dict[int, KvCopy] = {}
        self._restores: dict[int, bytes] = {}
        self._published: dict[bytes, int] | None = {} if records_published else None
        self._epoch = 0
        self.prefix_queries: int = 0
        self.prefix_hits: int = 0
        self.prefix_restored: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Return how many tokens the pool holds; unlimited if the pool can hold a whole sliding window."""
        num_blocks = len(self._pool.blocks)
        return sys.maxsize if self._window_blocks <= num_blocks else num_blocks * self.block_size

    @property
    def usage(self) -> KvUsage:
        return self._pool.usage

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        """Find the leading full blocks by hash, up to the first miss.

        At least the last token is left to compute, for its logits.
        """
        if not self._prefix_caching:
            return Prefix(0, (), keeps_all=table.keeps_all)
        self._extend_hashes(table, token_ids, len(token_ids))
        ids: list[int] = []
        for digest in islice(table.hashes, table.may_share(len(token_ids)) // self.block_size):
            block = self._pool.find(digest)
            if block is None:
                is_awaited = digest in self._pending
                return Prefix(len(ids) * self.block_size, tuple(ids), awaited=is_awaited, keeps_all=table.keeps_all)
            ids.append(block.id)
        return Prefix(len(ids) * self.block_size, tuple(ids), keeps_all=table.keeps_all)

    def hashes_after(self, table: KvTable, token_ids: list[int], prefix: Prefix) -> Sequence[bytes]:
        """Return the hashes that ``match`` went through and did not find."""
        if not self._prefix_caching:
            return ()
        return table.hashes[len(prefix.ids) : table.may_share(len(token_ids)) // self.block_size]

    def restore(self, digests: Sequence[bytes], stored: Collection[bytes]) -> None:
        """Take a block for each stored hash that the pool does not have."""
        held: list[Block] = []  # so that no block is taken from the sequence itself
        for digest in digests:
            block = self._pool.find(digest)
            if block is not None:
                self._pool.acquire(block)
            elif digest in stored and self._pool.num_available:
                block = self._take()
                self._pool.publish(block, digest)
                self._restores[block.id] = digest
                self.prefix_restored += self.block_size
            else:
                break
            held.append(block)
        for block in reversed(held):
            self._pool.release(block)

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        """Return whether there are blocks for ``num_tokens`` tokens (with a window, for those that live at once), plus
        one for each of ``num_growing`` sequences.
        """
        found, live = prefix.ids, self._num_blocks(num_tokens)
        if not prefix.keeps_all:
            found, live = found[self._num_out_of_window(prefix.num_tokens) :], min(live, self._window_blocks)
        taken_from_free = sum(self._pool.blocks[block_id].ref_count == 0 for block_id in found)
        return live - len(found) + taken_from_free + num_growing <= self._pool.num_available

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Reference the blocks of ``prefix``, and announce the full blocks that this sequence will compute."""
        assert not table.ids, "the table is in use"
        for block_id in prefix.ids:
            self._pool.acquire(self._pool.blocks[block_id])
        table.ids = list(prefix.ids)
        table.version += 1
        table.num_published = len(prefix.ids)
        table.num_out_of_window = 0
        table.epoch = self._epoch
        table.capacity = len(table.ids) * self.block_size
        table.next_commit = 0
        self._free_out_of_window(table, prefix.num_tokens)
        if self._prefix_caching:
            self._extend_hashes(table, token_ids, len(token_ids))
            for digest in islice(table.hashes, len(prefix.ids), None):
                self._pending.setdefault(digest, table)
            if table.may_share(len(token_ids)):
                self.prefix_queries += len(token_ids)
                self.prefix_hits += prefix.num_tokens

    def grow(self, table: KvTable, start: int, num_tokens: int, *, num_drafts: int = 0) -> int:
        """Copy shared blocks that would be written, and take new ones."""
        end = start + num_tokens
        if end <= table.capacity:
            return num_tokens
        ids, size, pool = table.ids, self.block_size, self._pool
        num_needed = self._num_blocks(end)
        for index in range(start // size, min(len(ids), num_needed)):
            shared = pool.blocks[ids[index]]
            if shared.ref_count > 1:
                if not pool.num_available:
                    return max(0, index * size - start)
                block = self._take()
                self._copies[block.id] = KvCopy(shared.id, block.id, size)
                pool.release(shared)
                ids = table.ids = [*ids[:index], block.id, *ids[index + 1 :]]
                table.version += 1
        for _ in range(min(num_needed - len(ids), pool.num_available)):
            ids.append(self._take().id)
        table.capacity = len(ids) * size
        return min(num_tokens, table.capacity - start)

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Publish the blocks that are now full, and free those outside the window."""
        if num_computed < table.next_commit:
            return
        num_full = num_computed // self.block_size
        if num_full > table.num_published and self.shares(table):
            self._extend_hashes(table, token_ids, num_computed)
            for index in range(table.num_published, num_full):
                digest, block = table.hashes[index], self._pool.blocks[table.ids[index]]
                self._publish(block, digest)
                if self._pending.get(digest) is table:
                    del self._pending[digest]
            table.num_published = num_full
        self._free_out_of_window(table, num_computed)
        table.next_commit = (num_full + 1) * self.block_size
        if self._window is not None and not table.keeps_all:
            table.next_commit = min(
                table.next_commit, (table.num_out_of_window + 1) * self.block_size + self._window - 1
            )

    def shares(self, table: KvTable) -> bool:
        """Return whether a table's KV may be found by other sequences."""
        return self._prefix_caching and table.epoch == self._epoch

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Return a second table over the same blocks; the first to write to a shared block gets a copy."""
        child = KvTable(table.cache_keys, most_shared=table.most_shared)
        child.ids = table.ids[: self._num_blocks(num_computed)]
        child.hashes = table.hashes[: num_computed // self.block_size]
        child.num_published = table.num_published
        child.num_out_of_window = table.num_out_of_window
        child.next_commit = table.next_commit
        child.epoch = table.epoch
        table.capacity = 0
        for block_id in islice(child.ids, child.num_out_of_window, None):
            self._pool.acquire(self._pool.blocks[block_id])
        return child

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Drop the table's references. The last blocks are released first and so evicted first: the first blocks serve
        the most other sequences.
        """
        for digest in islice(table.hashes, table.num_published, None):
            if self._pending.get(digest) is table:
                del self._pending[digest]
        self._release_all(table)
        table.ids = []
        table.capacity = table.num_published = table.num_out_of_window = 0

    @property
    def can_pin(self) -> bool:
        """Return whether blocks are found by their hashes."""
        return self._prefix_caching

    def pin(self, table: KvTable, num_computed: int) -> bool:
        """Exchange the table's full blocks for those that are found by their hashes, which differ where two sequences
        have computed the same, and release a block that is not full.
        """
        num_full = num_computed // self.block_size
        found = [self._pool.find(digest) for digest in table.hashes[:num_full]]
        blocks = [block for block in found if block is not None]
        if table.epoch != self._epoch or len(blocks) < num_full:
            return False
        for block in blocks:
            self._pool.acquire(block)
        self._release_all(table)
        table.ids = [block.id for block in blocks]
        table.version += 1
        table.capacity, table.num_published = len(blocks) * self.block_size, len(blocks)
        return True

    def forget(self, table: KvTable) -> None:
        """Withdraw the blocks of the table's tokens, including those outside the window."""
        for digest in table.hashes:
            self._pool.withdraw(digest)
            if self._published is not None:
                self._published.pop(digest, None)

    def take_copies(self) -> list[KvCopy]:
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def take_state_copies(self) -> list[StateCopy]:
        """Return nothing: :class:`~paged_sdk.kv.states.StatefulKvManager` keeps states beside this memory."""
        return []

    def take_restores(self) -> list[StoredBlock]:
        restores = [StoredBlock(block_id, digest) for block_id, digest in self._restores.items()]
        self._restores.clear()
        return restores

    def take_published(self) -> list[StoredBlock]:
        if not self._published:
            return []
        # Without one whose block has been taken for something else since: a reset records pinned blocks between two
        # steps, and the next one may release the pin and write there.
        published = [
            StoredBlock(block_id, digest)
            for digest, block_id in self._published.items()
            if self._pool.blocks[block_id].hash == digest
        ]
        self._published.clear()
        return published

    def take_released(self) -> list[int]:
        """Return nothing: the pool is one piece of storage."""
        return []

    def reset_prefix_cache(self, pinned: Iterable[KvTable] = ()) -> None:
        self._pool.forget_hashes()
        self._pending.clear()
        # Sequences that run already read theirs.
        self._restores = {key: digest for key, digest in self._restores.items() if self._pool.blocks[key].ref_count}
        if self._published is not None:
            self._published.clear()
        self._epoch += 1
        for table in pinned:
            table.epoch = self._epoch
            for block_id, digest in zip(table.ids, table.hashes, strict=False):
                block = self._pool.blocks[block_id]
                if block.hash is None:  # otherwise it is another pinned table's, too
                    self._publish(block, digest)

    def _publish(self, block: Block, digest: bytes) -> None:
        self._pool.publish(block, digest)
        if self._published is not None and block.hash is not None:
            self._published[digest] = block.id

    def _take(self) -> Block:
        block = self._pool.take()
        # A cached block that was still to be filled is taken for something else.
        self._restores.pop(block.id, None)
        return block

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_out_of_window(self, start: int) -> int:
        """Count the leading blocks that no query from position ``start`` on attends to."""
        return 0 if self._window is None else max(0, start - self._window + 1) // self.block_size

    def _free_out_of_window(self, table: KvTable, start: int) -> None:
        if table.keeps_all:
            return
        num_out_of_window = self._num_out_of_window(start)
        for index in range(table.num_out_of_window, num_out_of_window):
            self._release(self._pool.blocks[table.ids[index]])
            table.ids[index] = OUT_OF_WINDOW_BLOCK
        table.num_out_of_window = max(table.num_out_of_window, num_out_of_window)

    def _release_all(self, table: KvTable) -> None:
        for index in range(len(table.ids) - 1, table.num_out_of_window - 1, -1):
            self._release(self._pool.blocks[table.ids[index]])

    def _release(self, block: Block) -> None:
        self._pool.release(block)
        if block.ref_count == 0:
            # The block may be reused within this step: an older copy must not be written into it.
            self._copies.pop(block.id, None)

    def _extend_hashes(self, table: KvTable, token_ids: list[int], num_tokens: int) -> None:
        """Hash the full blocks of the first ``num_tokens`` tokens that are not hashed yet."""
        if num_tokens >= (len(table.hashes) + 1) * self.block_size:
            table.hashes += block_hashes(
                token_ids,
                self.block_size,
                table.cache_keys,
                known=table.hashes,
                most=num_tokens // self.block_size,
            )
