from __future__ import annotations

import sys

import pytest

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvCopy, KvTable, Prefix
from paged_sdk.kv.paged import OUT_OF_WINDOW_BLOCK, KvCacheManager
from shadow_kv import check_paged

SIZE = 4


def start(manager: KvCacheManager, token_ids: list[int], table: KvTable | None = None) -> tuple[KvTable, Prefix]:
    """Admit and compute a whole prompt."""
    table = table or KvTable()
    prefix = manager.match(table, token_ids)
    manager.attach(table, prefix, token_ids)
    missing = len(token_ids) - prefix.num_tokens
    assert manager.grow(table, prefix.num_tokens, missing) == missing
    manager.commit(table, token_ids, len(token_ids))
    return table, prefix


def hits(manager: KvCacheManager, token_ids: list[int], table: KvTable | None = None) -> int:
    return manager.match(table or KvTable(), token_ids).num_tokens


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_is_made_of_full_blocks_and_leaves_the_last_token(num_tokens: int, expected: int) -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(12))
    start(manager, prompt)
    assert hits(manager, prompt[:num_tokens]) == expected


def test_lookup_stops_at_the_first_difference() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(12))
    start(manager, prompt)
    assert hits(manager, [0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11, 12]) == 4
    assert hits(manager, [99, *prompt[1:]]) == 0


def test_shared_blocks_are_the_same_blocks() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(10))
    first, _ = start(manager, prompt)
    second, prefix = start(manager, prompt)
    assert prefix == Prefix(8, tuple(first.ids[:2]))
    assert second.ids[:2] == first.ids[:2]
    assert second.ids[2] != first.ids[2]
    assert manager.usage.used == 4
    assert (manager.prefix_queries, manager.prefix_hits) == (20, 8)


@pytest.mark.parametrize("other", [(CacheKey(b"salt"),), (CacheKey(b"a"), CacheKey(b"b"))])
def test_cache_keys_separate(other: tuple[CacheKey, ...]) -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(10))
    start(manager, prompt, KvTable(other))
    assert hits(manager, prompt) == 0
    assert hits(manager, prompt, KvTable((CacheKey(b"ab"),))) == 0
    assert hits(manager, prompt, KvTable(other)) == 8


def test_freed_blocks_stay_to_be_hit_and_the_tail_goes_first() -> None:
    manager = KvCacheManager(4, SIZE)
    prompt = list(range(16))
    table, _ = start(manager, prompt)
    manager.free(table, prompt, 16)
    assert manager.usage.cached == 4
    assert hits(manager, [*prompt, 0]) == 16
    other, _ = start(manager, [50, 51, 52])
    assert hits(manager, [*prompt, 0]) == 12
    manager.free(other, [50, 51, 52], 3)
    start(manager, [60, 61, 62])
    # The empty block was taken again, not another cached one.
    assert hits(manager, [*prompt, 0]) == 12


def test_blocks_finished_while_generating_are_hit_by_the_next_turn() -> None:
    manager = KvCacheManager(8, SIZE)
    token_ids = [1, 2, 3]
    table, _ = start(manager, token_ids)
    for token_id in range(4, 11):
        token_ids.append(token_id)
        assert manager.grow(table, len(token_ids) - 1, 1) == 1
        manager.commit(table, token_ids, len(token_ids))
    manager.free(table, token_ids, len(token_ids))
    assert hits(manager, [*token_ids, 77, 78]) == 8


def test_a_fork_shares_until_it_writes() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(6))
    table, _ = start(manager, prompt)
    children = [manager.fork(table, 6) for _ in range(2)]
    shared = table.ids[1]
    assert manager.usage.used == 2
    for each in (table, *children):
        assert manager.grow(each, 6, 1) == 1
    # The last one left has the block to itself.
    assert children[1].ids == [table.ids[0], shared]
    assert manager.take_copies() == [KvCopy(shared, table.ids[1], SIZE), KvCopy(shared, children[0].ids[1], SIZE)]
    assert len({table.ids[1], children[0].ids[1], shared}) == 3
    assert manager.take_copies() == []
    check_paged(manager, [table, *children])


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(8))
    table, _ = start(manager, prompt)
    manager.grow(table, 8, 4)
    child = manager.fork(table, 8)
    assert child.ids == table.ids[:2]
    assert manager.grow(child, 8, 1) == manager.grow(table, 8, 1) == 1
    assert manager.take_copies() == []
    check_paged(manager, [table, child])


def test_a_copy_needs_a_block() -> None:
    manager = KvCacheManager(2, SIZE)
    table, _ = start(manager, [1, 2, 3, 4, 5])
    child = manager.fork(table, 5)
    assert manager.grow(child, 5, 1) == 0
    manager.free(table, [1, 2, 3, 4, 5], 5)
    assert manager.grow(child, 5, 1) == 1
    assert manager.take_copies() == []


def test_drafts_that_reach_into_a_shared_block_get_what_can_be_copied() -> None:
    manager = KvCacheManager(4, SIZE)
    prompt = list(range(6))
    table, _ = start(manager, prompt)
    manager.grow(table, 6, 4)
    child = manager.fork(table, 10)
    assert (child.ids, manager.usage.used) == (table.ids, 3)
    assert manager.grow(child, 6, 4) == 2
    assert manager.usage.used == 4


def test_a_copy_into_a_block_that_was_given_up_is_not_done() -> None:
    manager = KvCacheManager(3, SIZE)
    prompt = [1, 2, 3, 4, 5]
    table, _ = start(manager, prompt)
    child, other = manager.fork(table, 5), manager.fork(table, 5)
    assert manager.grow(child, 5, 1) == 1
    given_up = child.ids[1]
    manager.free(child, prompt, 5)
    check_paged(manager, [table, other])
    assert manager.grow(other, 5, 1) == 1
    assert manager.take_copies() == [KvCopy(table.ids[1], given_up, SIZE)]
    assert other.ids[1] == given_up


def test_grow_gives_what_there_is() -> None:
    manager = KvCacheManager(3, SIZE)
    table = KvTable()
    manager.attach(table, Prefix(0, ()), list(range(20)))
    assert manager.grow(table, 0, 20) == 12
    assert manager.grow(table, 12, 1) == 0
    assert manager.max_sequence_tokens == 12


def test_fits_counts_hits_that_are_not_held_as_taken() -> None:
    manager = KvCacheManager(4, SIZE)
    prompt = list(range(8))
    table, _ = start(manager, prompt)
    manager.free(table, prompt, 8)
    longer = [*prompt, *range(20, 28)]
    prefix = manager.match(KvTable(), longer)
    assert prefix.num_tokens == 8
    assert manager.fits(prefix, 16, num_growing=0)
    assert not manager.fits(prefix, 16, num_growing=1)
    assert not manager.fits(prefix, 17, num_growing=0)
    holder, _ = start(manager, [*prompt, 99])
    prefix = manager.match(KvTable(), longer)
    assert manager.fits(prefix, 12, num_growing=0)
    assert not manager.fits(prefix, 13, num_growing=0)
    manager.free(holder, [*prompt, 99], 9)


def test_what_is_being_computed_is_awaited_until_it_is_there_or_given_up() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(12))
    leader, follower = KvTable(), KvTable()
    manager.attach(leader, manager.match(leader, prompt), prompt)
    assert manager.match(follower, prompt) == Prefix(0, (), awaited=True)
    assert not manager.match(KvTable(), [9, *prompt]).awaited
    # Nothing but the last token is left to share.
    assert not manager.match(KvTable(), prompt[:4]).awaited
    manager.grow(leader, 0, 6)
    manager.commit(leader, prompt, 6)
    found = manager.match(follower, prompt)
    assert (found.num_tokens, found.awaited) == (4, True)
    manager.free(leader, prompt, 6)
    found = manager.match(follower, prompt)
    assert (found.num_tokens, found.awaited) == (4, False)


def test_a_second_leader_does_not_take_the_first_ones_announcement_along() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(9))
    leader, careless = KvTable(), KvTable(most_shared=0)
    manager.attach(leader, manager.match(leader, prompt), prompt)
    manager.attach(careless, manager.match(careless, prompt), prompt)
    manager.free(careless, prompt, 0)
    assert manager.match(KvTable(), prompt).awaited
    assert manager.prefix_queries == 9


def test_one_that_needs_all_logits_finds_nothing_but_is_found() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(9))
    start(manager, prompt)
    table, prefix = start(manager, [*prompt, 10, 11, 12], KvTable(most_shared=0))
    assert prefix == Prefix(0, ())
    assert manager.fork(table, 12).most_shared == 0
    assert hits(manager, [*prompt, 10, 11, 12, 13]) == 12


def test_without_prefix_caching_nothing_is_hashed() -> None:
    manager = KvCacheManager(8, SIZE, prefix_caching=False)
    prompt = list(range(9))
    table, _ = start(manager, prompt)
    assert not manager.match(KvTable(), prompt).awaited
    manager.free(table, prompt, 9)
    assert hits(manager, prompt) == 0
    assert table.hashes == []
    assert manager.usage.free == 8
    assert (manager.prefix_queries, manager.prefix_hits) == (0, 0)


def test_after_a_reset_old_kv_is_never_found_again() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(9))
    old, _ = start(manager, prompt)
    manager.reset_prefix_cache()
    assert hits(manager, prompt) == 0
    # It goes on with old KV, which must not mix with new.
    prompt += [9, 10, 11]
    manager.grow(old, 9, 3)
    manager.commit(old, prompt, 12)
    child = manager.fork(old, 12)
    manager.commit(child, prompt, 12)
    assert hits(manager, [*prompt, 12]) == 0
    manager.free(old, prompt, 12)
    manager.free(child, prompt, 12)
    assert manager.usage.free == 8
    # Once recomputed it is like any other.
    start(manager, prompt, old)
    assert hits(manager, [*prompt, 12]) == 12


def test_a_window_gives_back_what_it_left() -> None:
    manager = KvCacheManager(8, SIZE, sliding_window=6)
    prompt = list(range(12))
    table, _ = start(manager, prompt)
    ids = list(table.ids)
    # The query at 12 attends to 7 to 12: block 0 is out of the window, block 1 is not.
    assert manager.grow(table, 12, 1) == 1
    assert table.ids == [OUT_OF_WINDOW_BLOCK, *ids[1:], table.ids[3]]
    assert (manager.usage.used, manager.usage.cached) == (3, 1)
    manager.commit(table, [*prompt, 12], 13)
    child = manager.fork(table, 13)
    check_paged(manager, [table, child])
    # What left the window is still found, and only what the window sees is held.
    second = KvTable()
    prefix = manager.match(second, [*prompt, 12])
    assert prefix.num_tokens == 12
    manager.attach(second, prefix, [*prompt, 12])
    manager.grow(second, 12, 1)
    assert second.ids[:3] == [OUT_OF_WINDOW_BLOCK, *ids[1:]]
    check_paged(manager, [table, child, second])


def test_a_window_makes_any_length_possible_if_the_pool_holds_it() -> None:
    # 6 tokens span at most 3 blocks of 4.
    assert KvCacheManager(3, SIZE, sliding_window=6).max_sequence_tokens == sys.maxsize
    assert KvCacheManager(2, SIZE, sliding_window=6).max_sequence_tokens == 8
    manager = KvCacheManager(3, SIZE, sliding_window=6, prefix_caching=False)
    token_ids = list(range(60))
    table = KvTable()
    manager.attach(table, manager.match(table, token_ids), token_ids)
    computed = 0
    while computed < 60:
        room = manager.grow(table, computed, 60 - computed)
        assert room > 0
        computed += room
        manager.commit(table, token_ids, computed)
    manager.free(table, token_ids, 60)
    assert manager.usage.free == 3


def test_a_window_asks_for_what_lives_at_once() -> None:
    manager = KvCacheManager(6, SIZE, sliding_window=6)
    assert manager.fits(Prefix(0, ()), 1000, num_growing=0)
    holder, _ = start(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.fits(Prefix(0, ()), 1000, num_growing=0)
    manager.grow(holder, 8, 1)
    # Three blocks are left: a window's worth, but not one more for the holder.
    assert manager.fits(Prefix(0, ()), 1000, num_growing=0)
    assert not manager.fits(Prefix(0, ()), 1000, num_growing=1)
    assert manager.fits(Prefix(0, ()), 8, num_growing=1)
    assert manager.take_released() == []


def test_a_pinned_table_holds_the_blocks_that_are_found() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(10))
    both = [KvTable(), KvTable()]
    for table in both:  # admitted at once, so that each computes all
        manager.attach(table, Prefix(0, ()), prompt)
        assert manager.grow(table, 0, len(prompt)) == len(prompt)
    for table in both:
        manager.commit(table, prompt, len(prompt))
    first, second = both
    found = list(first.ids[:2])
    assert manager.pin(second, len(prompt))
    assert manager.pin(second, len(prompt))
    assert second.ids == found
    manager.free(first, prompt, len(prompt))
    assert manager.usage.used == 2
    filler, _ = start(manager, [50] * 6 * SIZE)
    manager.free(filler, [50] * 6 * SIZE, 6 * SIZE)
    assert hits(manager, prompt) == 8
    check_paged(manager, [second])
    manager.free(second, prompt, len(prompt))
    start(manager, [60] * 8 * SIZE)
    assert hits(manager, prompt) == 0


def test_a_table_to_be_pinned_keeps_what_is_outside_of_the_window() -> None:
    manager = KvCacheManager(8, SIZE, sliding_window=5)
    prompt = list(range(6 * SIZE))
    table, _ = start(manager, prompt, KvTable(keeps_all=True))
    assert manager.usage.used == 6
    assert manager.pin(table, len(prompt))
    assert not manager.fits(manager.match(KvTable(keeps_all=True), [50] * 12), 12, num_growing=0)
    other, _ = start(manager, [*prompt, 1])
    assert OUT_OF_WINDOW_BLOCK in other.ids
    check_paged(manager, [table, other])
    assert hits(manager, [*prompt, 1]) == len(prompt)


def test_a_pinned_table_outlasts_a_reset_and_not_a_nan() -> None:
    manager = KvCacheManager(8, SIZE)
    prompt = list(range(8))
    table, _ = start(manager, prompt)
    manager.reset_prefix_cache()
    assert not manager.pin(table, 8), "it was computed before the reset"
    manager.free(table, prompt, 8)
    table, _ = start(manager, prompt)
    assert manager.pin(table, 8)
    manager.reset_prefix_cache([table])
    assert hits(manager, [*prompt, 1]) == 8
    failing, _ = start(manager, [*prompt[:6], 99])
    manager.forget(failing)
    manager.free(failing, [*prompt[:6], 99], 7)
    assert not manager.pin(table, 8)
    assert hits(manager, [*prompt, 1]) == 0


def stored_blocks(manager: KvCacheManager, token_ids: list[int]) -> list[bytes]:
    """Compute a sequence, and return the hashes of its full blocks, as a store would learn them."""
    table = KvTable()
    manager.attach(table, manager.match(table, token_ids), token_ids)
    assert manager.grow(table, 0, len(token_ids)) == len(token_ids)
    manager.commit(table, token_ids, len(token_ids))
    manager.free(table, token_ids, len(token_ids))
    published = {block.digest: block.block_id for block in manager.take_published()}
    assert list(published) == table.hashes
    assert manager.take_published() == []
    return table.hashes


def test_published_blocks_are_recorded_once_and_only_on_request() -> None:
    assert stored_blocks(KvCacheManager(4, 2, records_published=True), [1, 2, 3, 4, 5])
    manager = KvCacheManager(4, 2)
    table = KvTable()
    manager.attach(table, manager.match(table, [1, 2]), [1, 2])
    manager.grow(table, 0, 2)
    manager.commit(table, [1, 2], 2)
    assert manager.take_published() == []


def test_a_published_block_that_is_taken_for_something_else_is_not_stored() -> None:
    manager = KvCacheManager(2, 2, records_published=True)
    pinned = KvTable()
    manager.attach(pinned, manager.match(pinned, [1, 2, 3, 4]), [1, 2, 3, 4])
    assert manager.grow(pinned, 0, 4) == 4
    manager.commit(pinned, [1, 2, 3, 4], 4)
    assert manager.pin(pinned, 4)
    first, _ = manager.take_published()
    manager.reset_prefix_cache([pinned])  # records both again, outside a step
    manager.free(pinned, [1, 2, 3, 4], 4)
    other = KvTable()
    manager.attach(other, manager.match(other, [7]), [7])
    assert manager.grow(other, 0, 1) == 1  # writes to the last block, which is evicted first
    assert manager.take_published() == [first]


def test_restored_blocks_are_found_again() -> None:
    manager = KvCacheManager(4, 2, records_published=True)
    digests = stored_blocks(manager, [1, 2, 3, 4, 5, 6])
    manager.reset_prefix_cache()
    manager.restore(digests, digests[:2])
    restores = manager.take_restores()
    assert [each.digest for each in restores] == digests[:2]
    assert manager.prefix_restored == 4
    prefix = manager.match(KvTable(), [1, 2, 3, 4, 5, 6])
    assert (prefix.num_tokens, list(prefix.ids)) == (4, [each.block_id for each in restores])
    assert manager.take_published() == []


def test_a_restored_block_that_is_taken_for_something_else_is_not_filled() -> None:
    manager = KvCacheManager(2, 2, records_published=True)
    digests = stored_blocks(manager, [1, 2, 3, 4])
    manager.reset_prefix_cache()
    manager.restore(digests, digests)
    table = KvTable()
    manager.attach(table, manager.match(table, [7, 8]), [7, 8])
    assert manager.grow(table, 0, 2) == 2
    assert [each.digest for each in manager.take_restores()] == digests[:1]  # the last block went first


def test_no_block_is_taken_from_the_prefix_that_is_restored() -> None:
    manager = KvCacheManager(4, 2, records_published=True)
    wanted = stored_blocks(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.reset_prefix_cache()
    stored_blocks(manager, [1, 2])  # is released first, so it is the first to be taken
    stored_blocks(manager, [9, 9, 8, 8, 7, 7])
    manager.restore(wanted, wanted[1:])
    assert manager.match(KvTable(), [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8


def test_blocks_that_run_are_still_filled_after_a_reset() -> None:
    manager = KvCacheManager(4, 2, records_published=True)
    digests = stored_blocks(manager, [1, 2, 3, 4, 5])
    manager.reset_prefix_cache()
    manager.restore(digests, digests)
    table = KvTable()
    manager.attach(table, manager.match(table, [1, 2, 5]), [1, 2, 5])
    manager.reset_prefix_cache()
    assert [each.digest for each in manager.take_restores()] == digests[:1]


def test_what_is_withdrawn_is_not_stored() -> None:
    manager = KvCacheManager(4, 2, records_published=True)
    table = KvTable()
    manager.attach(table, manager.match(table, [1, 2, 3]), [1, 2, 3])
    manager.grow(table, 0, 3)
    manager.commit(table, [1, 2, 3], 3)
    manager.forget(table)
    assert manager.take_published() == []
