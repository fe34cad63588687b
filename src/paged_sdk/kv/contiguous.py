"""Manage contiguous KV memory: one growing slot per sequence; the last finished ones are kept as prefixes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from attrs import frozen

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvCopy, KvTable, KvUsage, Prefix, StateCopy, StoredBlock

__all__ = ["SequenceKvManager", "common_prefix_length"]


def common_prefix_length(first: list[int], second: list[int]) -> int:
    """Count the leading tokens that two sequences share, by bisection over slices: O(n) in total."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _reach_of_equal_keys(first: tuple[CacheKey, ...], second: tuple[CacheKey, ...]) -> int:
    """Count the leading tokens that depend on the same keys in both sequences."""
    return min((key.first_token for key in set(first) ^ set(second)), default=sys.maxsize)


@frozen(eq=False)
class _Kept:
    """Records a finished sequence: the tokens whose KV its slot holds, and what else that KV depends on."""

    token_ids: list[int]
    cache_keys: tuple[CacheKey, ...]

    def covers(self, other: _Kept) -> bool:
        """Return whether every prefix that ``other`` offers is offered here."""
        length = len(other.token_ids)
        reach = _reach_of_equal_keys(self.cache_keys, other.cache_keys)
        return reach >= length and self.token_ids[:length] == other.token_ids


class SequenceKvManager:
    """Keeps one slot per sequence (a :class:`~paged_sdk.kv.manager.KvManager`), for engines without paged attention.

    A new sequence starts from the kept slot with the longest common prefix. If that prefix is all that the slot holds,
    the slot is taken over; otherwise the prefix is copied into a new slot. Slot numbers are never reused, so copies and
    releases of different steps cannot be confused.

    :param max_sequence_tokens: tokens that a slot may grow to
    :param max_num_seqs: sequences that hold a slot at once
    :param num_kept: finished sequences to keep, least recently used evicted first; 0: none
    """

    def __init__(self, *, max_sequence_tokens: int, max_num_seqs: int, num_kept: int) -> None:
        self._max_sequence_tokens = max_sequence_tokens
        self._max_num_seqs = max_num_seqs
        self._num_kept = num_kept
        self._num_slots = 0
        self._num_used = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._copies: dict[int, KvCopy] = {}
        self._released: list[int] = []
        self._epoch = 0
        self.prefix_queries: int = 0
        self.prefix_hits: int = 0
        self.prefix_restored: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        return self._max_sequence_tokens

    @property
    def usage(self) -> KvUsage:
        """Return how many slots are used, cached and free."""
        total, used, cached = self._max_num_seqs + self._num_kept, self._num_used, len(self._kept)
        return KvUsage(total=total, used=used, cached=cached, free=total - used - cached)

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        """Find the longest common prefix with a kept sequence; at least the last token is left to compute."""
        best = Prefix(0, ())
        most = table.may_share(len(token_ids))
        for slot, kept in reversed(self._kept.items()):
            reach = min(_reach_of_equal_keys(kept.cache_keys, table.cache_keys), most)
            if reach > best.num_tokens:
                num_common = min(common_prefix_length(kept.token_ids, token_ids), reach)
                if num_common > best.num_tokens:
                    best = Prefix(num_common, (slot,))
        return best

    def hashes_after(self, table: KvTable, token_ids: list[int], prefix: Prefix) -> Sequence[bytes]:
        """Return nothing: slots have no hashes."""
        return ()

    def restore(self, digests: Sequence[bytes], stored: Collection[bytes]) -> None:
        """Do nothing, as nothing is stored."""

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        """Return True: slots grow as needed."""
        return True

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Take over the kept slot, copy from it, or start an empty one."""
        assert not table.ids, "the table is in use"
        self._num_used += 1
        table.epoch = self._epoch
        slot, table.source = self._take_prefix(prefix, token_ids)
        table.ids = [slot]
        table.version += 1
        table.capacity = table.next_commit = sys.maxsize
        if self._num_kept and table.may_share(len(token_ids)):
            self.prefix_queries += len(token_ids)
            self.prefix_hits += prefix.num_tokens

    def grow(self, table: KvTable, start: int, num_tokens: int, *, num_drafts: int = 0) -> int:
        """Grant all tokens: slots grow as needed."""
        return num_tokens

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Do nothing: a sequence's KV is shared once it has finished."""

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Give the fork its own slot, with a copy of the computed KV."""
        child = KvTable(table.cache_keys, most_shared=table.most_shared)
        child.epoch = table.epoch
        child.source = table.source
        child.ids = [self._copy_of(table.ids[0], num_computed)]
        child.capacity = child.next_commit = sys.maxsize
        self._num_used += 1
        return child

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Keep the slot as a prefix if it can be reused; otherwise release it."""
        (slot,) = table.ids
        table.ids = []
        self._num_used -= 1
        never_filled = self._copies.pop(slot, None) is not None
        if num_computed == 0 or never_filled or table.epoch != self._epoch:
            self._released.append(slot)
        else:
            self._keep(slot, _Kept(list(token_ids[:num_computed]), table.cache_keys))

    @property
    def can_pin(self) -> bool:
        """Return False: see :meth:`pin`."""
        return False

    def pin(self, table: KvTable, num_computed: int) -> bool:
        """Return False: sequences that continue a prefix copy it from its slot, so holding that saves them nothing."""
        return False

    def forget(self, table: KvTable) -> None:
        """Do not keep the table's slot, and release the kept slot from which its first KV was copied. Other slots stay:
        what they have in common with this one, they computed themselves, or attended to without NaN.
        """
        table.epoch = -1  # treated as from before a reset: never shared
        if table.source is not None and self._kept.pop(table.source, None) is not None:
            self._released.append(table.source)

    def take_copies(self) -> list[KvCopy]:
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def take_state_copies(self) -> list[StateCopy]:
        """Return nothing: :class:`~paged_sdk.kv.states.StatefulKvManager` keeps states beside this memory."""
        return []

    def take_restores(self) -> list[StoredBlock]:
        """Return nothing: slots are not stored."""
        return []

    def take_published(self) -> list[StoredBlock]:
        """Return nothing: slots are not stored."""
        return []

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def reset_prefix_cache(self, pinned: Iterable[KvTable] = ()) -> None:
        self._released.extend(self._kept)
        self._kept.clear()
        self._epoch += 1

    def _take_prefix(self, prefix: Prefix, token_ids: list[int]) -> tuple[int, int | None]:
        """Return a slot that starts with ``prefix``, and the kept slot that it is copied from, if it is a copy."""
        if not prefix.ids:
            return self._new_slot(), None
        (slot,) = prefix.ids
        kept_ids = self._kept[slot].token_ids
        is_whole = prefix.num_tokens >= min(len(kept_ids), len(token_ids) - 1)
        if is_whole and kept_ids == token_ids[: len(kept_ids)]:
            del self._kept[slot]
            return slot, None
        self._kept.move_to_end(slot)
        return self._copy_of(slot, prefix.num_tokens), slot

    def _copy_of(self, src: int, num_tokens: int) -> int:
        assert src not in self._copies, "a copy of a copy within one step"
        slot = self._new_slot()
        self._copies[slot] = KvCopy(src, slot, num_tokens)
        return slot

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _keep(self, slot: int, sequence: _Kept) -> None:
        """Keep a slot. Of two sequences where one is a prefix of the other, only the longer is kept."""
        for other_slot, other in list(self._kept.items()):
            if other.covers(sequence):
                self._kept.move_to_end(other_slot)
                self._released.append(slot)
                return
            if sequence.covers(other):
                del self._kept[other_slot]
                self._released.append(other_slot)
        self._kept[slot] = sequence
        while len(self._kept) > self._num_kept:
            evicted, _ = self._kept.popitem(last=False)
            self._released.append(evicted)
