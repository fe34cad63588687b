"""Remember which prefixes each replica was sent, and forget what its pool has room for no more."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

__all__ = ["KnownPrefixes", "landmarks"]

MOST_HOLDERS: Final = 32
"""Of the replicas that hold one prefix, so many are remembered: a prompt that all requests begin with would take an
entry for each of 10,000 replicas, and looking at each would take a millisecond."""

DEPTHS: Final = (*range(1, 16), *(depth << step for step in range(1, 9) for depth in range(8, 16)), 4096)
"""At these numbers of blocks a prefix is remembered: at each of the first 15, and deeper down at 8 in each doubling.
So what two prompts have in common is known but for 12 % at most, and a prompt of 131,072 tokens has 80 entries instead
of 4,096."""

GAPS: Final = (1, *(deeper - depth for depth, deeper in pairwise(DEPTHS)))
"""How many blocks each of the entries stands for: those since the one before it."""


def landmarks(hashes: Sequence[bytes]) -> list[bytes]:
    """Return the names of a prompt's remembered prefixes, shortest first: eight bytes of a block's name do, because
    whoever finds two prompts with the same makes no more of it than a request at the wrong replica.
    """
    return [hashes[depth - 1][:8] for depth in DEPTHS[: bisect_right(DEPTHS, len(hashes))]]


class KnownPrefixes:
    """Remembers, for each replica, the prefixes that it was sent last and that its pool has room for.

    Within a prompt the longest prefix is the first to be forgotten, as blocks of pools are: so whoever holds a prefix
    holds all that is shorter.

    :param capacities: how many blocks each replica's pool has
    :param max_entries: how many prefixes may be remembered; each replica has an equal share of them
    """

    def __init__(self, capacities: Sequence[int], *, max_entries: int) -> None:
        self._capacities = list(capacities)
        self._max_entries = max_entries
        self._num_known = len(capacities)
        self._share = max_entries // len(capacities)
        self._held: list[OrderedDict[bytes | int, int]] = [OrderedDict() for _ in capacities]  # ints are fillers
        self._num_blocks = [0] * len(capacities)
        self._holders: dict[bytes | int, tuple[int, ...]] = {}
        # One of each, because most prefixes have one holder, and many entries then take no tuple of their own.
        self._alone = [(replica,) for replica in range(len(capacities))]
        self._num_fillers = 0

    @property
    def num_entries(self) -> int:
        """Return how many prefixes are remembered, counted for each replica that holds them."""
        return sum(map(len, self._held))

    def num_blocks(self, replica: int) -> int:
        """Return how many blocks a replica is believed to hold."""
        return self._num_blocks[replica]

    def matches(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return how many blocks of a prompt each replica is believed to hold, of those that hold any.

        Whoever holds a prefix holds all that is shorter, so the longest that anybody holds is found by halving, and
        shorter ones are looked at only until they have no holder more.

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
        """Take it that a replica holds a prompt, and has used it last.

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
            except KeyError:  # too many others hold it
                self._add(replica, keys[place], GAPS[place])
        self._make_room(replica)

    def fill(self, replica: int, num_blocks: int) -> None:
        """Take it that a replica's pool holds so many blocks more, which no prompt begins with."""
        if num_blocks and self._capacities[replica]:
            self._num_fillers += 1
            self._held[replica][-self._num_fillers] = num_blocks
            self._num_blocks[replica] += num_blocks
            self._make_room(replica)

    def add(self, capacity: int) -> int:
        """Remember what one more replica holds, and return its number. The others have to do with a smaller share.

        :param capacity: how many blocks its pool has
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
        """Forget everything that a replica holds, for good: the others may have its share."""
        self.forget(replica)
        self._capacities[replica] = 0
        self._share_out(self._num_known - 1)

    def _share_out(self, num_known: int) -> None:
        self._num_known = num_known
        self._share = self._max_entries // max(num_known, 1)

    def forget(self, replica: int) -> None:
        """Forget everything that a replica holds."""
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
        holders = self._holders.get(key)  # none for what no prompt begins with
        if holders is None:
            return
        left = tuple(each for each in holders if each != replica)
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = self._alone[left[0]] if len(left) == 1 else left
