"""Remember which prefixes each replica was sent, and forget what its pool has room for no more."""

from __future__ import annotations

from bisect import bisect_right
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


def landmarks(hashes: Sequence[bytes]) -> list[int]:
    """Return the names of a prompt's remembered prefixes, shortest first: eight bytes of a block's name do, because
    whoever finds two prompts with the same makes no more of it than a request at the wrong replica.
    """
    count = bisect_right(DEPTHS, len(hashes))
    return [int.from_bytes(hashes[depth - 1][:8], "little") for depth in DEPTHS[:count]]


class KnownPrefixes:
    """Remembers, for each replica, the prefixes that it was sent last and that its pool has room for.

    Within a prompt the longest prefix is the first to be forgotten, as blocks of pools are: so whoever holds a prefix
    holds all that is shorter.

    :param capacities: how many blocks each replica's pool has
    :param max_entries: how many prefixes may be remembered; each replica has an equal share of them
    """

    def __init__(self, capacities: Sequence[int], *, max_entries: int) -> None:
        self._capacities = list(capacities)
        self._share = max_entries // len(capacities)
        self._held: list[OrderedDict[int, int]] = [OrderedDict() for _ in capacities]
        self._num_blocks = [0] * len(capacities)
        self._holders: dict[int, tuple[int, ...]] = {}
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

    def matches(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many blocks of a prompt each replica is believed to hold, of those that hold any.

        :param keys: the prompt's :func:`landmarks`
        """
        found = []
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            found.append(holders)
        matched: dict[int, int] = {}
        for place in range(len(found) - 1, -1, -1):
            if len(found[place]) > len(matched):  # whoever holds more holds this too
                for replica in found[place]:
                    matched.setdefault(replica, DEPTHS[place])
        return matched

    def note(self, replica: int, keys: Sequence[int]) -> None:
        """Take it that a replica holds a prompt, and has used it last.

        :param keys: the prompt's :func:`landmarks`
        """
        if not self._capacities[replica]:
            return
        held = self._held[replica]
        for place in range(min(len(keys), self._share) - 1, -1, -1):
            key = keys[place]
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = GAPS[place]
                self._num_blocks[replica] += GAPS[place]
                self._add_holder(key, replica)
        self._make_room(replica)

    def fill(self, replica: int, num_blocks: int) -> None:
        """Take it that a replica's pool holds so many blocks more, which no prompt begins with."""
        if num_blocks and self._capacities[replica]:
            self._num_fillers += 1
            self._held[replica][-self._num_fillers] = num_blocks
            self._num_blocks[replica] += num_blocks
            self._make_room(replica)

    def forget(self, replica: int) -> None:
        """Forget everything that a replica holds."""
        held, self._held[replica] = self._held[replica], OrderedDict()
        self._num_blocks[replica] = 0
        for key in held:
            self._remove_holder(key, replica)

    def _make_room(self, replica: int) -> None:
        held, capacity = self._held[replica], self._capacities[replica]
        while held and (self._num_blocks[replica] > capacity or len(held) > self._share):
            key, gap = held.popitem(last=False)
            self._num_blocks[replica] -= gap
            self._remove_holder(key, replica)

    def _add_holder(self, key: int, replica: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = self._alone[replica]
            return
        if len(holders) == MOST_HOLDERS:
            oldest, *rest = holders
            self._num_blocks[oldest] -= self._held[oldest].pop(key)
            holders = tuple(rest)
        self._holders[key] = (*holders, replica)

    def _remove_holder(self, key: int, replica: int) -> None:
        holders = self._holders.get(key)  # none for what no prompt begins with
        if holders is None:
            return
        left = tuple(each for each in holders if each != replica)
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = self._alone[left[0]] if len(left) == 1 else left
