from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.kv.block import Block
from paged_sdk.kv.block_pool import BlockPool, FreeList
from paged_sdk.kv.manager import KvUsage


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "popleft"]), st.integers(0, 5))))
def test_free_list_does_what_a_deque_does(operations: list[tuple[str, int]]) -> None:
    blocks = [Block(block_id) for block_id in range(6)]
    free, expected = FreeList(), deque[int]()
    for operation, block_id in operations:
        listed = block_id in expected
        if operation == "append" and not listed:
            free.append(blocks[block_id])
            expected.append(block_id)
        elif operation == "prepend" and not listed:
            free.prepend(blocks[block_id])
            expected.appendleft(block_id)
        elif operation == "remove" and listed:
            free.remove(blocks[block_id])
            expected.remove(block_id)
        elif operation == "popleft" and expected:
            assert free.popleft().id == expected.popleft()
        assert [block.id for block in free] == list(expected)
        assert len(free) == len(expected)


def test_free_list_refuses_what_would_break_it() -> None:
    free, block = FreeList(), Block(0)
    with pytest.raises(AssertionError):
        free.popleft()
    with pytest.raises(AssertionError):
        free.remove(block)
    free.append(block)
    with pytest.raises(AssertionError):
        free.append(block)


def test_empty_blocks_are_taken_before_cached_ones_and_those_least_recently_held_first() -> None:
    pool = BlockPool(4)
    held = [pool.take() for _ in range(4)]
    for block, digest in zip(held[:3], (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
    for index in (1, 0, 3, 2):
        pool.release(held[index])
    assert pool.usage == KvUsage(total=4, used=0, cached=3, free=1)
    pool.acquire(held[1])
    pool.release(held[1])
    assert [pool.take().id for _ in range(4)] == [3, 0, 2, 1]
    assert pool.find(b"a") is pool.find(b"b") is pool.find(b"c") is None
    assert pool.usage == KvUsage(total=4, used=4, cached=0, free=0)


def test_a_block_outlives_its_last_reference_until_it_is_taken() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.publish(block, b"a")
    pool.release(block)
    assert pool.find(b"a") is block
    pool.acquire(block)
    pool.acquire(block)
    assert (block.ref_count, pool.num_available) == (2, 1)
    pool.release(block)
    pool.release(block)
    assert {pool.take().id, pool.take().id} == {0, 1}
    assert pool.find(b"a") is None


def test_of_two_blocks_with_the_same_content_the_first_stays_known() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") is first
    assert second.hash is None
    pool.release(second)
    assert pool.usage == KvUsage(total=2, used=1, cached=0, free=1)


def test_blocks_that_are_withdrawn_are_found_no_more_and_taken_first() -> None:
    pool = BlockPool(3)
    kept, freed = pool.take(), pool.take()
    pool.publish(kept, b"a")
    pool.publish(freed, b"b")
    pool.release(freed)
    assert pool.usage == KvUsage(total=3, used=1, cached=1, free=1)
    for digest in (b"a", b"b", b"b", b"unknown"):
        pool.withdraw(digest)
    assert pool.find(b"a") is pool.find(b"b") is None
    assert pool.usage == KvUsage(total=3, used=1, cached=0, free=2)
    assert pool.take() is freed
    pool.release(kept)
    assert pool.usage == KvUsage(total=3, used=1, cached=0, free=2)


def test_forgetting_hashes_empties_cached_blocks_and_leaves_references() -> None:
    pool = BlockPool(2)
    kept, freed = pool.take(), pool.take()
    pool.publish(kept, b"a")
    pool.publish(freed, b"b")
    pool.release(freed)
    pool.forget_hashes()
    assert pool.find(b"a") is pool.find(b"b") is None
    assert pool.usage == KvUsage(total=2, used=1, cached=0, free=1)
    pool.publish(kept, b"c")
    assert pool.find(b"c") is kept


def test_wrong_use_is_an_internal_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.release(pool.blocks[0])
    with pytest.raises(AssertionError):
        pool.publish(pool.blocks[0], b"a")
    block = pool.take()
    pool.publish(block, b"a")
    with pytest.raises(AssertionError):
        pool.publish(block, b"b")
    assert repr(block) == "Block(0, ref_count=1, hash=61)"
