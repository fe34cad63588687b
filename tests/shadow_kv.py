"""Model KV memory without tensors: every cell holds a mark of the whole history that its key and value would depend on.

A block table that points to the wrong block, a missing copy, a write to a shared block: each results in a wrong mark.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvCopy, KvTable
from paged_sdk.kv.paged import OUT_OF_WINDOW_BLOCK, KvCacheManager


def history_marks(token_ids: Sequence[int], cache_keys: Sequence[CacheKey] = ()) -> list[int]:
    """Return one mark per token; marks are equal only where cache keys and all tokens up to there are equal."""
    mark = 0
    marks = []
    for position, token_id in enumerate(token_ids):
        begun = tuple(int.from_bytes(key.content, "big") for key in cache_keys if key.first_token == position)
        mark = hash((mark, token_id, begun))
        marks.append(mark)
    return marks


class ShadowKv:
    """Holds cells addressed as the device addresses them.

    :param block_size: tokens per block; None: contiguous slots
    """

    def __init__(self, block_size: int | None) -> None:
        self.block_size = block_size
        self.cells: dict[tuple[int, int], int] = {}
        self.num_copies = 0

    def locate(self, kv_ids: Sequence[int], position: int) -> tuple[int, int]:
        if self.block_size is None:
            (slot,) = kv_ids
            return slot, position
        return kv_ids[position // self.block_size], position % self.block_size

    def read(self, kv_ids: Sequence[int], position: int) -> int | None:
        return self.cells.get(self.locate(kv_ids, position))

    def write(self, kv_ids: Sequence[int], position: int, mark: int) -> None:
        self.cells[self.locate(kv_ids, position)] = mark

    def copy(self, copies: Sequence[KvCopy]) -> None:
        """Do the copies of one step, after checking that all at once and one after the other give the same result."""
        destinations = [copy.dst for copy in copies]
        assert len(set(destinations)) == len(destinations)
        at_once = [
            (copy.dst, offset, self.cells.get((copy.src, offset)))
            for copy in copies
            for offset in range(copy.num_tokens)
        ]
        for copy in copies:
            for offset in range(copy.num_tokens):
                self._put(copy.dst, offset, self.cells.get((copy.src, offset)))
        for index, offset, mark in at_once:
            assert self.cells.get((index, offset)) == mark
        self.num_copies += len(copies)

    def release(self, slots: Iterable[int]) -> None:
        gone = set(slots)
        self.cells = {key: mark for key, mark in self.cells.items() if key[0] not in gone}

    def _put(self, index: int, offset: int, mark: int | None) -> None:
        if mark is None:
            self.cells.pop((index, offset), None)
        else:
            self.cells[index, offset] = mark


def check_paged(manager: KvCacheManager, tables: Iterable[KvTable]) -> None:
    """Check everything that must hold of a manager and all tables that live, whatever was done."""
    pool, tables = manager._pool, list(tables)
    references = Counter(block_id for table in tables for block_id in table.ids[table.num_out_of_window :])
    for block in pool.blocks:
        assert block.ref_count == references[block.id]
    for table in tables:
        assert all(block_id == OUT_OF_WINDOW_BLOCK for block_id in table.ids[: table.num_out_of_window])
        assert len(set(table.ids[table.num_out_of_window :])) == len(table.ids) - table.num_out_of_window
        assert (
            table.num_out_of_window <= table.num_published
            or not manager._prefix_caching
            or table.epoch != manager._epoch
        )

    free = list(pool._free_list)
    assert len(free) == len(pool._free_list) == pool.num_available
    assert sorted(block.id for block in free) == [block.id for block in pool.blocks if block.ref_count == 0]
    for before, after in itertools.pairwise(free):
        assert before.next is after
        assert after.prev is before
        # An empty block goes before one that may still be hit.
        assert before.hash is None or after.hash is not None
    for block in pool.blocks:
        if block.ref_count:
            assert block.next is block is block.prev

    assert {block.id: block.hash for block in pool._by_hash.values()} == {
        block.id: block.hash for block in pool.blocks if block.hash is not None
    }
    assert all(block.hash == digest for digest, block in pool._by_hash.items())

    usage = manager.usage
    assert usage.used + usage.cached + usage.free == usage.total == len(pool.blocks)
    assert usage.used == sum(block.ref_count > 0 for block in pool.blocks)
    assert usage.cached == sum(block.hash is not None for block in free)

    for digest, owner in manager._pending.items():
        assert any(owner is table for table in tables)
        assert digest in owner.hashes[owner.num_published :]
    for dst, copy in manager._copies.items():
        assert copy.dst == dst != copy.src
        assert pool.blocks[dst].ref_count == 1
        assert pool.blocks[dst].hash is None
