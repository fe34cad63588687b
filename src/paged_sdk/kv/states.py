"""Manage the slots of sequences' states in recurrent layers, beside the KV memory of the other layers."""

from __future__ import annotations

from paged_sdk.kv.manager import KvCopy, KvManager, KvTable, KvUsage, Prefix, StateCopy

__all__ = ["StatefulKvManager"]


class StatefulKvManager:
    """Gives each running sequence a slot of state (a :class:`~paged_sdk.kv.manager.KvManager`).

    A sequence has a slot exactly while its table is in use: from ``attach`` until ``free``, at which its state is lost.
    So the KV manager beside it must find no prefixes: cached KV would be of no use without the state at its end.

    :param kv: manages the KV of the layers with attention, without a prefix cache
    :param num_slots: sequences that run at once, at most
    """

    def __init__(self, kv: KvManager, num_slots: int) -> None:
        self._kv = kv
        self._free = list(reversed(range(num_slots)))
        self._copies: dict[int, StateCopy] = {}  # by target

    @property
    def num_free_slots(self) -> int:
        """Return how many slots no sequence has."""
        return len(self._free)

    @property
    def max_sequence_tokens(self) -> int:
        return self._kv.max_sequence_tokens

    @property
    def prefix_queries(self) -> int:
        return self._kv.prefix_queries

    @property
    def prefix_hits(self) -> int:
        return self._kv.prefix_hits

    @property
    def usage(self) -> KvUsage:
        return self._kv.usage

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        prefix = self._kv.match(table, token_ids)
        assert not prefix.num_tokens, "KV of a prefix is of no use without the state at its end"
        return prefix

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        return self._kv.fits(prefix, num_tokens, num_growing=num_growing)

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Give the sequence a slot, too. What it holds is of another sequence: the first row starts from zero."""
        self._kv.attach(table, prefix, token_ids)
        table.state_slot = self._free.pop()

    def grow(self, table: KvTable, start: int, num_tokens: int) -> int:
        return self._kv.grow(table, start, num_tokens)

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        self._kv.commit(table, token_ids, num_computed)

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Give the second table a slot, with a copy of the state, which must be that after ``num_computed`` tokens."""
        child = self._kv.fork(table, num_computed)
        child.state_slot = self._free.pop()
        self._copies[child.state_slot] = StateCopy(table.state_slot, child.state_slot)
        return child

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Take the slot back, too: the device executes steps in order, so the next step may give it to another."""
        self._kv.free(table, token_ids, num_computed)
        self._copies.pop(table.state_slot, None)  # it must not overwrite another copy to the slot
        self._free.append(table.state_slot)
        table.state_slot = 0

    def forget(self, table: KvTable) -> None:
        self._kv.forget(table)

    def take_copies(self) -> list[KvCopy]:
        return self._kv.take_copies()

    def take_state_copies(self) -> list[StateCopy]:
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def take_released(self) -> list[int]:
        return self._kv.take_released()

    def reset_prefix_cache(self) -> None:
        self._kv.reset_prefix_cache()
