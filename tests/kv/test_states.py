"""Slots of states after steps with drafts; the scheduler's machines test the rest."""

from __future__ import annotations

from typing import Final

from paged_sdk.kv.manager import KvTable, StateCopy
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.kv.states import StatefulKvManager

SIZE: Final = 4
TOKENS: Final = list(range(100, 130))


def make_manager(*, num_drafts: int) -> StatefulKvManager:
    kv = KvCacheManager(12, SIZE, prefix_caching=True)
    return StatefulKvManager(kv, num_running=2, num_kept=3, num_drafts=num_drafts)


def begun(manager: StatefulKvManager) -> KvTable:
    """Return the table of a text of which 5 tokens are computed, and the state after 4 is kept."""
    table = KvTable()
    manager.attach(table, manager.match(table, TOKENS[:5]), TOKENS[:5])
    assert manager.grow(table, 0, 5) == SIZE  # a prompt's chunk ends at the end of a block
    manager.commit(table, TOKENS[:5], SIZE)
    assert manager.grow(table, SIZE, 1) == 1
    manager.commit(table, TOKENS[:6], 5)
    assert len(manager.take_state_copies()) == 1
    return table


def test_a_state_before_drafts_serves_for_the_ends_of_blocks_among_those_that_were_right() -> None:
    for num_right, num_found in ((5, 8), (2, 8), (1, 4), (0, 4)):
        manager = make_manager(num_drafts=5)
        table = begun(manager)
        assert manager.grow(table, 5, 1 + 5, num_drafts=5) == 6
        end = 6 + num_right
        manager.commit(table, TOKENS[: end + 1], end)
        assert table.capacity < end + 1  # so that the next row asks
        assert manager.grow(table, end, 1) == 1
        copies = manager.take_state_copies()
        assert copies == ([StateCopy(table.state_slot, 3)] if num_found == 8 else [])
        manager.free(table, TOKENS[: end + 1], end)
        assert manager.match(KvTable(), TOKENS).num_tokens == num_found


def test_as_many_drafts_are_granted_as_slots_have_room_for() -> None:
    manager = make_manager(num_drafts=3)
    table = begun(manager)
    assert manager.grow(table, 5, 1 + 7, num_drafts=7) == 1 + 3
    assert table.state_end == 6
    none = make_manager(num_drafts=0)
    table = begun(none)
    assert none.grow(table, 5, 1 + 7, num_drafts=7) == 1
    assert table.state_end == 0


def test_no_more_sequences_fit_than_there_are_slots() -> None:
    manager = make_manager(num_drafts=0)
    for _ in range(2):
        table = KvTable()
        prefix = manager.match(table, [1, 2])
        assert manager.fits(prefix, 2, num_growing=0)
        manager.attach(table, prefix, [1, 2])
    assert not manager.fits(manager.match(KvTable(), [1, 2]), 2, num_growing=0)
    manager.free(table, [1, 2], 0)
    assert manager.fits(manager.match(KvTable(), [1, 2]), 2, num_growing=0)
