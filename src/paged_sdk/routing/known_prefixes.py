"""Tracks which prefixes each replica holds, from the prompts that it was sent and the size of its pool."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

__all__ = ["KnownPrefixes", "landmarks"]

MOST_HOLDERS: Final = 32
"""Maximum number of replicas remembered as holders of one prefix. Without it, a prefix common to all requests would
have an entry for each of 10,000 replicas, and examining them would take a millisecond.
"""

DEPTHS: Final = (*range(1, 16), *(depth << step for step in range(1, 9) for depth in range(8, 16)), 4096)
"""Lengths in blocks at which prefixes are remembered: each of the first 15, then 8 per doubling. So the length that two
prompts have in common is underestimated by 12 % at most, and a prompt of 131,072 tokens has 80 entries instead of
4,096."""

GAPS: Final = (1, *(deeper - depth for depth, deeper in pairwise(DEPTHS)))
"""How many blocks the entry at each depth adds to the entry before it."""


def landmarks(hashes: Sequence[bytes]) -> list[bytes]:
    """Return the keys of a prompt's prefixes at ``DEPTHS``, shortest first. A key is the first eight bytes of the hash
    of the prefix's last block: a collision only sends a request to the wrong replica.
    """
    return [hashes[depth - 1][:8] for depth in DEPTHS[: bisect_right(DEPTHS, len(hashes))]]


class KnownPrefixes:
    """Tracks, for each replica, the most recently used prefixes that fit into its pool (LRU).

    Within a prompt the longest prefix is forgotten first, as pools evict the last blocks first. So a replica that holds
    a prefix holds all shorter ones.

    :param capacities: number of blocks of each replica's pool
    :param max_entries: maximum number of remembered prefixes, divided equally among the replicas
    """

    def __init__(self, capacities: Sequence[int], *, max_entries: int) -> None:
        self._capacities = list(capacities)
        self._max_entries = max_entries
        self._num_known = len(capacities)
        self._share = max_entries // len(capacities)
        self._held: list[OrderedDict[bytes | int, int]] = [OrderedDict() for _ in capacities]  # ints: see fill()
        self._num_blocks = [0] * len(capacities)
        self._holders: dict[bytes | int, tuple[int, ...]] = {}
        # Shared tuples of one replica: most prefixes have one holder, and need no tuple of their own.
        self._alone = [(replica,) for replica in range(len(capacities))]
        self._num_fillers = 0

    @property
    def num_entries(self) -> int:
        """Return the number of remembered prefixes, summed over replicas."""
        return sum(map(len, self._held))

    def num_blocks(self, replica: int) -> int:
        """Return the estimated number of blocks that a replica holds."""
        return self._num_blocks[replica]

    def matches(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return the estimated number of a prompt's blocks that each replica holds, for the replicas that hold any.

        A replica that holds a prefix holds all shorter ones. So the longest known prefix is found by binary search, and
        shorter prefixes are examined only until all holders of the shortest are found.

        :param keys: the prompt's :func:`landmarks`
        """
        holders = self._holders
        num_found = bisect_left(range(len(keys)), 1, key=lambda place: keys[place] not in holders)
        matched: dict[int, int] = {}
        if num_found:
            most = len(holders.get(keys[0], ()))
            for place in range(num_found - 1, -1, -1):
                own = holders.get(keys[place], ())
                if len(own) > len(matched):
                    for replica in own:
                        matched.setdefault(replica, DEPTHS[place])
                if len(matched) >= most:
                    break
        return matched

    def note(self, replica: int, keys: Sequence[bytes]) -> None:
        """Record a prompt as held, and most recently used, by a replica.

        :param keys: the prompt's :func:`landmarks`
        """
        if not self._capacities[replica]:
            return
        held = self._held[replica]
        num_held = min(len(keys), self._share)
        while num_held and keys[num_held - 1] not in held:
            num_held -= 1
            self._add(replica, keys[num_held], GAPS[num_held])
        for place in range(num_held - 1, -1, -1):
            try:
                held.move_to_end(keys[place])
            except KeyError:  # this holder was dropped because of MOST_HOLDERS
                self._add(replica, keys[place], GAPS[place])
        self._make_room(replica)

    def fill(self, replica: int, num_blocks: int) -> None:
        """Record blocks of generated tokens in a replica's pool. They take room, but match no prompt."""
        if num_blocks and self._capacities[replica]:
            self._num_fillers += 1
            self._held[replica][-self._num_fillers] = num_blocks
            self._num_blocks[replica] += num_blocks
            self._make_room(replica)

    def add(self, capacity: int) -> int:
        """Add a replica, and return its number. The share of each other replica shrinks.

        :param capacity: number of blocks of its pool
        """
        replica = len(self._capacities)
        self._capacities.append(capacity)
        self._held.append(OrderedDict())
        self._num_blocks.append(0)
        self._alone.append((replica,))
        self._share_out(self._num_known + 1)
        for each in range(replica):
            self._make_room(each)
        return replica

    def remove(self, replica: int) -> None:
        """Remove a replica for good. Its share goes to the others."""
        self.forget(replica)
        self._capacities[replica] = 0
        self._share_out(self._num_known - 1)

    def _share_out(self, num_known: int) -> None:
        self._num_known = num_known
        self._share = self._max_entries // max(num_known, 1)

    def forget(self, replica: int) -> None:
        """Forget all prefixes of a replica."""
        held, self._held[replica] = self._held[replica], OrderedDict()
        self._num_blocks[replica] = 0
        for key in held:
            self._remove_holder(key, replica)

    def _make_room(self, replica: int) -> None:
        held, capacity, holders = self._held[replica], self._capacities[replica], self._holders
        alone = self._alone[replica]
        while held and (self._num_blocks[replica] > capacity or len(held) > self._share):
            key, gap = held.popitem(last=False)
            self._num_blocks[replica] -= gap
            if holders.get(key) is alone:
                del holders[key]
            else:
                self._remove_holder(key, replica)

    def _add(self, replica: int, key: bytes, gap: int) -> None:
        self._held[replica][key] = gap
        self._num_blocks[replica] += gap
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = self._alone[replica]
            return
        if len(holders) == MOST_HOLDERS:
            oldest, *rest = holders
            self._num_blocks[oldest] -= self._held[oldest].pop(key)
            holders = tuple(rest)
        self._holders[key] = (*holders, replica)

    def _remove_holder(self, key: bytes | int, replica: int) -> None:
        holders = self._holders.get(key)  # None for an entry of fill()
        if holders is None:
            return
        left = tuple(each for each in holders if each != replica)
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = self._alone[left[0]] if len(left) == 1 else left
