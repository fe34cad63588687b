from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.contiguous import SequenceKvManager, common_prefix_length
from paged_sdk.kv.manager import KvCopy, KvTable, Prefix


def make_manager(num_kept: int = 2) -> SequenceKvManager:
    return SequenceKvManager(max_sequence_tokens=100, max_num_seqs=4, num_kept=num_kept)


def start(manager: SequenceKvManager, token_ids: list[int], cache_keys: tuple[CacheKey, ...] = ()) -> KvTable:
    table = KvTable(cache_keys)
    manager.attach(table, manager.match(table, token_ids), token_ids)
    return table


def run(manager: SequenceKvManager, token_ids: list[int]) -> int:
    """Run a sequence's whole life, and return the slot that it had."""
    table = start(manager, token_ids)
    (slot,) = table.ids
    manager.take_copies()
    manager.free(table, token_ids, len(token_ids))
    return slot


short = st.lists(st.integers(0, 1), max_size=12)


@settings(deadline=None, derandomize=True)
@given(common=short, first=short, second=short)
def test_common_prefix_length_is_that_of_a_plain_loop(common: list[int], first: list[int], second: list[int]) -> None:
    first, second = common + first, common + second
    expected = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        expected += 1
    assert common_prefix_length(first, second) == expected


def test_a_kept_sequence_that_is_a_prefix_is_taken_over() -> None:
    manager = make_manager()
    slot = run(manager, [1, 2, 3])
    table = start(manager, [1, 2, 3, 4, 5])
    assert table.ids == [slot]
    assert manager.take_copies() == []
    assert manager.usage.cached == 0
    assert (manager.prefix_queries, manager.prefix_hits) == (8, 3)


def test_the_same_prompt_again_takes_over_and_leaves_the_last_token() -> None:
    manager = make_manager()
    slot = run(manager, [1, 2, 3])
    assert manager.match(KvTable(), [1, 2, 3]) == Prefix(2, (slot,))
    assert start(manager, [1, 2, 3]).ids == [slot]


def test_otherwise_the_common_part_is_copied() -> None:
    manager = make_manager()
    slot = run(manager, [1, 2, 3, 4])
    table = start(manager, [1, 2, 9])
    assert table.ids != [slot]
    assert manager.take_copies() == [KvCopy(slot, table.ids[0], 2)]
    assert (manager.usage.used, manager.usage.cached) == (1, 1)


def test_the_longest_common_prefix_wins_and_cache_keys_separate() -> None:
    manager = make_manager(3)
    run(manager, [1, 2, 3])
    longer = run(manager, [1, 2, 4, 5])
    run(manager, [7])
    assert manager.match(KvTable(), [1, 2, 4, 6]) == Prefix(3, (longer,))
    assert manager.match(KvTable((CacheKey(b"salt"),)), [1, 2, 4, 6]) == Prefix(0, ())
    assert manager.match(KvTable(most_shared=0), [1, 2, 4, 6]) == Prefix(0, ())


def test_the_least_recently_used_is_released() -> None:
    manager = make_manager(2)
    first, second = run(manager, [1, 1]), run(manager, [2, 2])
    table = start(manager, [1, 9])
    third = run(manager, [3, 3])
    assert list(manager._kept) == [first, third]
    assert manager.take_released() == [second]
    assert manager.take_released() == []
    manager.free(table, [1, 9], 0)
    assert manager.take_released() == [*table.ids, third - 1]


def test_of_two_where_one_starts_with_the_other_the_longer_is_kept() -> None:
    manager = make_manager(3)
    tables = [start(manager, [1, 2]), start(manager, [1, 2]), start(manager, [1, 2])]
    slots = [table.ids[0] for table in tables]
    manager.free(tables[0], [1, 2, 3], 3)
    manager.free(tables[1], [1, 2, 3, 4], 4)
    manager.free(tables[2], [1, 2], 2)
    assert list(manager._kept) == [slots[1]]
    assert manager.take_released() == [slots[0], slots[2]]


def test_equal_tokens_with_other_cache_keys_are_kept_beside() -> None:
    manager = make_manager(3)
    plain, salted = start(manager, [1, 2]), start(manager, [1, 2], (CacheKey(b"salt"),))
    slots = [*plain.ids, *salted.ids]
    manager.free(plain, [1, 2], 2)
    manager.free(salted, [1, 2, 3], 3)
    assert list(manager._kept) == slots
    assert manager.match(KvTable((CacheKey(b"salt"),)), [1, 2, 3, 4]) == Prefix(3, (slots[1],))


def test_a_fork_is_a_copy_unless_it_ends_before_it_is_made() -> None:
    manager = make_manager()
    table = start(manager, [1, 2, 3])
    children = [manager.fork(table, 3) for _ in range(2)]
    slots = [child.ids[0] for child in children]
    manager.free(children[1], [1, 2, 3], 3)
    assert manager.take_copies() == [KvCopy(table.ids[0], slots[0], 3)]
    # It never held anything, so there is nothing to keep.
    assert manager.take_released() == [slots[1]]
    assert manager.usage.cached == 0


def test_what_ends_in_nan_takes_only_the_slot_with_it_that_it_was_copied_from() -> None:
    manager = make_manager(3)
    other, source = run(manager, [0, 1, 2, 3]), run(manager, [0, 5, 6, 7])  # 0: a token that every prompt begins with
    table = start(manager, [0, 5, 9])
    manager.take_copies()
    child = manager.fork(table, 3)
    manager.take_copies()
    for each in (table, child):
        (slot,) = each.ids
        manager.forget(each)
        manager.free(each, [0, 5, 9], 3)
        assert slot not in manager._kept
    assert list(manager._kept) == [other]
    assert source in manager.take_released()
    assert manager.match(KvTable(), [0, 5, 9]) == Prefix(1, (other,))


def test_what_shares_no_kv_with_nan_stays() -> None:
    manager = make_manager(3)
    salted = KvTable((CacheKey(b"salt"),))
    kept = run(manager, [1, 2, 3])
    manager.attach(salted, manager.match(salted, [1, 2, 3]), [1, 2, 3])
    manager.forget(salted)
    manager.free(salted, [1, 2, 3], 3)
    assert list(manager._kept) == [kept]
    taken = start(manager, [1, 2, 3, 4])
    assert taken.ids == [kept]
    manager.forget(taken)
    manager.free(taken, [1, 2, 3, 4], 4)
    assert manager.usage.cached == 0


def test_a_reset_releases_what_is_kept_and_what_runs_is_not_kept() -> None:
    manager = make_manager()
    kept = run(manager, [1, 2, 3])
    table = start(manager, [5, 6])
    (slot,) = table.ids
    manager.reset_prefix_cache()
    manager.free(table, [5, 6], 2)
    assert manager.take_released() == [kept, slot]
    assert manager.usage.free == manager.usage.total


def test_without_a_prefix_cache_every_slot_is_released() -> None:
    manager = make_manager(0)
    slot = run(manager, [1, 2, 3])
    assert manager.take_released() == [slot]
    assert manager.match(KvTable(), [1, 2, 3]) == Prefix(0, ())
    assert manager.prefix_queries == 0


def test_slots_grow_as_they_need_to() -> None:
    manager = make_manager()
    table = start(manager, [1])
    assert manager.fits(Prefix(0, ()), 10**9, num_growing=0)
    assert manager.grow(table, 1, 50) == 50
    manager.commit(table, [1], 1)
    assert manager.max_sequence_tokens == 100
    with pytest.raises(AssertionError):
        manager.attach(table, Prefix(0, ()), [1])
