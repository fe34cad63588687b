"""Choose the replica that serves a request soonest, by prefixes and load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Final

from paged_sdk.config.checks import plain
from paged_sdk.errors import ConfigError
from paged_sdk.routing.known_prefixes import KnownPrefixes, landmarks

__all__ = ["Route", "Router"]

MANY: Final = 32
"""Of more replicas than this not each is looked at: with 10,000 that would take a millisecond."""

DRAWS: Final = 8
"""Of many replicas the least busy of so many, drawn at random, stands for the least busy of all."""

TOKENS_PER_TEXT: Final = 32
"""What a text that is being generated counts for in a replica's load, in prompt tokens. Too little, and texts crowd
together; too much, and conversations leave the replica that holds them for a small difference in load."""

MISSING_COUNTS: Final = 2
"""So often a prompt token counts that a replica does not hold: for its own request, which waits for it, and for those
that come after. With once, four replicas near their limit had 95 % of one big cache's hits, with twice 99 %, and the
slowest hundredth of first tokens came after 3.4 s instead of 6.0 (benchmarks.replica_scale)."""

MAX_ENTRIES: Final = 200_000
"""Of prefixes over all replicas; an entry takes 250 bytes at most."""


class Route:
    """Is the way of one request, which :meth:`Router.started` and :meth:`Router.finished` take back.

    :ivar replica: where it goes
    :ivar num_matched: how many blocks of its prompt the replica is believed to hold
    :ivar num_missing: how many of its tokens the replica is believed to have to compute
    :ivar num_texts: how many texts continue it
    :ivar has_started: whether its prompt is computed
    :ivar has_ended: whether the replica has no more to do with it
    """

    __slots__ = ("has_ended", "has_started", "num_matched", "num_missing", "num_texts", "replica")

    def __init__(self, replica: int, num_matched: int, num_missing: int, num_texts: int) -> None:
        self.replica: int = replica
        self.num_matched: int = num_matched
        self.num_missing: int = num_missing
        self.num_texts: int = num_texts
        self.has_started: bool = False
        self.has_ended: bool = False


class Router:
    """Chooses a replica for each request, so that the request is served soonest.

    A replica's price is counted in prompt tokens: those that it has to compute for requests that wait there, twice
    those of this prompt that it does not hold, and something for each text that it is generating. The lowest is taken;
    of equal ones, the replica that holds the least, so that tenants spread over the caches. A conversation stays where
    it is, because that replica holds the most of it, until another is less busy by more than twice what it would have
    to compute anew.

    Prefixes are known by the names that the engines themselves have for blocks, chains of hashes over tokens, images,
    adapters and cache salts (:func:`paged_sdk.kv.block_hash.block_hashes`). A name stands for all that led to it, so
    nothing is taken for what it is not, and a salt's requests match only their own. What a replica holds is believed,
    not asked: what it was sent and has said, less what its pool must have evicted since.

    It takes and gives plain values, has no lock and reads no clock: a set of replicas and a simulator drive the same
    one. What it knows takes 50 MB at most.

    :param capacities: how many blocks each replica's pool has; 0 for one that keeps no prefixes. Others may come later
        (:meth:`open`), and any may go (:meth:`close`)
    :param block_size: tokens of a block
    :param tokens_per_text: what a text that is being generated counts for, in prompt tokens
    :param max_entries: how many prefixes are remembered at most, over all replicas
    :param seed: of the draws among more than 32 replicas
    :raises ConfigError: a value that cannot be used
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        block_size: int = 32,
        tokens_per_text: int = TOKENS_PER_TEXT,
        max_entries: int = MAX_ENTRIES,
        seed: int = 0,
    ) -> None:
        if isinstance(capacities, str | bytes) or not isinstance(capacities, Sequence) or not capacities:
            raise ConfigError.of("capacities", capacities, "blocks of each of at least one replica")
        sizes = [_int("capacities", each, 0) for each in capacities]
        self._block_size = _int("block_size", block_size, 1)
        self._tokens_per_text = _int("tokens_per_text", tokens_per_text, 0)
        self._prefixes = KnownPrefixes(sizes, max_entries=_int("max_entries", max_entries, 0))
        self._loads = [0] * len(sizes)
        self._open = list(range(len(sizes)))
        self._is_open = [True] * len(sizes)
        self._random = Random(_int("seed", seed, 0))

    @property
    def open_replicas(self) -> tuple[int, ...]:
        """Return the replicas that requests are sent to."""
        return tuple(self._open)

    @property
    def num_entries(self) -> int:
        """Return how many prefixes are remembered, counted for each replica that holds them."""
        return self._prefixes.num_entries

    def load(self, replica: int) -> int:
        """Return how busy a replica is, in prompt tokens."""
        return self._loads[replica]

    def num_blocks(self, replica: int) -> int:
        """Return how many blocks a replica is believed to hold."""
        return self._prefixes.num_blocks(replica)

    def route(
        self, hashes: Sequence[bytes], num_tokens: int, *, num_texts: int = 1, avoid: Collection[int] = ()
    ) -> Route | None:
        """Choose a replica, and count the request as its own from now on.

        :param hashes: names of the prompt's full blocks, from its start on; as many as are worth looking at
        :param num_tokens: how many tokens the prompt has
        :param num_texts: how many texts are to continue it
        :param avoid: replicas that it must not be
        :returns: None if no replica is left
        """
        keys = landmarks(hashes)
        matched = self._prefixes.matches(keys)
        loads, num_blocks, size = self._loads, self._prefixes.num_blocks, self._block_size
        worth = MISSING_COUNTS * size
        best, best_price = -1, 0
        for replica in self._candidates(matched, avoid):
            price = loads[replica] - matched.get(replica, 0) * worth
            if best < 0 or price < best_price or (price == best_price and num_blocks(replica) < num_blocks(best)):
                best, best_price = replica, price
        if best < 0:
            return None
        num_matched = matched.get(best, 0)
        route = Route(best, num_matched, max(num_tokens - num_matched * size, 0), num_texts)
        self._prefixes.note(best, keys)
        self._loads[best] += route.num_missing + num_texts * self._tokens_per_text
        return route

    def started(self, route: Route) -> None:
        """Be told that a request's prompt is computed, so that only its texts are left."""
        if not (route.has_started or route.has_ended):
            route.has_started = True
            self._loads[route.replica] -= route.num_missing

    def finished(self, route: Route, num_generated: int = 0) -> None:
        """Be told that a request has ended, in whatever way; once or more often.

        :param num_generated: how many tokens its texts have, which lie in the pool too
        """
        if route.has_ended:
            return
        self.started(route)
        route.has_ended = True
        self._loads[route.replica] -= route.num_texts * self._tokens_per_text
        if self._is_open[route.replica]:
            self._prefixes.fill(route.replica, num_generated // self._block_size)

    def open(self, capacity: int) -> int:
        """Send requests to one more replica from now on, and return its number, which no other has had.

        :param capacity: how many blocks its pool has; 0 for one that keeps no prefixes
        """
        replica = self._prefixes.add(_int("capacity", capacity, 0))
        self._loads.append(0)
        self._is_open.append(True)
        self._open.append(replica)
        return replica

    def close(self, replica: int) -> None:
        """Send a replica nothing more, and forget what it holds."""
        if self._is_open[replica]:
            self._is_open[replica] = False
            self._open.remove(replica)
            self._prefixes.remove(replica)

    def forget(self) -> None:
        """Take it that no replica holds anything, as when their prefix caches were reset."""
        for replica in self._open:
            self._prefixes.forget(replica)

    def _candidates(self, matched: Iterable[int], avoid: Collection[int]) -> Collection[int]:
        """Return the replicas that one is chosen of: those that hold some of a prompt, and the least busy."""
        every = self._open
        if len(every) > MANY:
            draw, num = self._random.random, len(every)
            some = {*matched, *(every[int(draw() * num)] for _ in range(DRAWS))}
            if left := some.difference(avoid) if avoid else some:
                return left
        return [replica for replica in every if replica not in avoid] if avoid else every


def _int(name: str, value: object, least: int) -> int:
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ConfigError.of(name, value, f"an int >= {least}")
    return number
