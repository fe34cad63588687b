"""Chooses the replica that serves a request soonest, by cached prefixes and load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Final

from paged_sdk.config.checks import plain
from paged_sdk.errors import ConfigError
from paged_sdk.routing.known_prefixes import KnownPrefixes, landmarks

__all__ = ["Route", "Router"]

MANY: Final = 32
"""Up to this many replicas, each is examined for every request. Examining 10,000 would take a millisecond."""

DRAWS: Final = 8
"""Beyond ``MANY`` replicas, only this many random ones are examined besides those that hold a prefix of the prompt."""

TOKENS_PER_TEXT: Final = 32
"""Load of one sequence in decode, in prompt tokens. If too small, decoding sequences pile up on one replica; if too
large, conversations leave the replica that caches them for a small difference in load."""

MISSING_COUNTS: Final = 2
"""Weight of a prompt token that a replica does not hold: it delays its own request and those behind it. In a simulation
of four replicas near saturation (benchmarks.replica_scale), weight 1 reached 95 % of the hits of one big cache and a
99th percentile of time to first token of 6.0 s; weight 2 reached 99 % and 3.4 s."""

MAX_ENTRIES: Final = 200_000
"""Default limit of remembered prefixes over all replicas; an entry takes 250 bytes at most."""


class Route:
    """Holds the decision for one request. Pass it to :meth:`Router.started` and :meth:`Router.finished` later.

    :ivar replica: number of the chosen replica
    :ivar num_matched: estimated number of the prompt's blocks that the replica holds
    :ivar num_missing: estimated number of the prompt's tokens that the replica has to compute
    :ivar num_texts: number of choices to generate
    :ivar has_started: whether the prompt has been computed
    :ivar has_ended: whether the request has ended at this replica
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
    """Chooses the replica that serves each request soonest.

    A replica's cost for a request is counted in prompt tokens: the uncomputed prompt tokens of requests that wait
    there, plus twice the tokens of this prompt that the replica does not hold, plus a constant for each sequence that
    it is decoding. The replica with the lowest cost is chosen; among equals, the one with the fewest blocks in use, so
    that tenants spread over the caches. A conversation stays at the replica that holds most of it, until another's load
    is lower by more than twice the tokens that the other would have to recompute.

    Prefixes are identified by the engines' own block hashes, chained over tokens, images, adapters and cache salts
    (:func:`paged_sdk.kv.block_hash.block_hashes`). So only equal prefixes match, and requests with a cache salt match
    only requests with the same salt. The contents of a replica's cache are estimated, not queried: the prompts it was
    sent and the tokens it generated, minus what its pool must have evicted since.

    The router takes and returns plain values, has no lock and reads no clock, so replica sets and simulators use the
    same class. Its state takes 50 MB at most.

    :param capacities: number of blocks of each replica's pool; 0: no prefix cache. Replicas can be added (:meth:`open`)
        and removed (:meth:`close`)
    :param block_size: tokens per block
    :param tokens_per_text: load of one sequence in decode, in prompt tokens
    :param max_entries: maximum number of remembered prefixes, over all replicas
    :param seed: seed of the random choice among more than 32 replicas
    :raises ConfigError: invalid value
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
        """Return the numbers of the replicas that requests are sent to."""
        return tuple(self._open)

    @property
    def num_entries(self) -> int:
        """Return the number of remembered prefixes, summed over replicas."""
        return self._prefixes.num_entries

    def load(self, replica: int) -> int:
        """Return a replica's load, in prompt tokens."""
        return self._loads[replica]

    def num_blocks(self, replica: int) -> int:
        """Return the estimated number of blocks that a replica holds."""
        return self._prefixes.num_blocks(replica)

    def route(
        self, hashes: Sequence[bytes], num_tokens: int, *, num_texts: int = 1, avoid: Collection[int] = ()
    ) -> Route | None:
        """Choose a replica for a request, and add the request to its load.

        :param hashes: hashes of the prompt's full blocks, from the first on; may be cut off after any block
        :param num_tokens: number of tokens of the prompt
        :param num_texts: number of choices to generate
        :param avoid: replicas not to choose
        :returns: the decision; None if no replica is left
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
        """Remove a request's prompt from the load of its replica, because it has been computed. Idempotent."""
        if not (route.has_started or route.has_ended):
            route.has_started = True
            self._loads[route.replica] -= route.num_missing

    def finished(self, route: Route, num_generated: int = 0) -> None:
        """Remove a request from the load of its replica, however it has ended. Idempotent.

        :param num_generated: number of generated tokens, whose blocks are in the pool too
        """
        if route.has_ended:
            return
        self.started(route)
        route.has_ended = True
        self._loads[route.replica] -= route.num_texts * self._tokens_per_text
        if self._is_open[route.replica]:
            self._prefixes.fill(route.replica, num_generated // self._block_size)

    def note(self, replica: int, hashes: Sequence[bytes]) -> None:
        """Record that a replica computes a prefix that it was not chosen for.

        :param hashes: as for :meth:`route`
        """
        self._prefixes.note(replica, landmarks(hashes))

    def open(self, capacity: int) -> int:
        """Add a replica, and return its number. Numbers are never reused.

        :param capacity: number of blocks of its pool; 0: no prefix cache
        """
        replica = self._prefixes.add(_int("capacity", capacity, 0))
        self._loads.append(0)
        self._is_open.append(True)
        self._open.append(replica)
        return replica

    def close(self, replica: int) -> None:
        """Remove a replica: it is never chosen again, and its prefixes are forgotten. Idempotent."""
        if self._is_open[replica]:
            self._is_open[replica] = False
            self._open.remove(replica)
            self._prefixes.remove(replica)

    def forget(self) -> None:
        """Forget all prefixes, after the replicas' prefix caches were reset."""
        for replica in self._open:
            self._prefixes.forget(replica)

    def _candidates(self, matched: Iterable[int], avoid: Collection[int]) -> Collection[int]:
        """Return the replicas to examine: all; or, beyond ``MANY``, those that hold a prefix of the prompt and some
        drawn at random.
        """
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
