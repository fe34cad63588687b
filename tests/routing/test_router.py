"""The router: it finds prefixes by their exact names, spreads load, and forgets what it must."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_sdk import ConfigError
from paged_sdk.kv.block_hash import CacheKey, block_hashes
from paged_sdk.routing import Route, Router
from paged_sdk.routing.known_prefixes import DEPTHS, GAPS, KnownPrefixes, landmarks

SIZE = 4


def names(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return block_hashes(tokens, SIZE, [CacheKey(salt)] if salt else [])


def routed(router: Router, tokens: list[int], salt: bytes = b"", **more: Any) -> Route:
    route = router.route(names(tokens, salt), len(tokens), **more)
    assert route is not None
    return route


def test_landmarks_are_dense_at_the_start_and_cover_every_block() -> None:
    assert DEPTHS[:15] == tuple(range(1, 16))
    assert list(DEPTHS) == sorted(set(DEPTHS))
    assert sum(GAPS) == DEPTHS[-1]
    assert all(gap <= max(1, depth / 8) for gap, depth in zip(GAPS, DEPTHS, strict=True))
    hashes = names(list(range(400)))
    assert landmarks(hashes)[:15] == landmarks(hashes[:15])


def test_a_conversation_stays_where_its_prefix_is() -> None:
    router, rng = Router([100] * 4, block_size=SIZE), Random(0)
    talks = [[rng.randrange(99) for _ in range(40)] for _ in range(8)]
    homes = [routed(router, talk).replica for talk in talks]
    assert sorted(homes) == [0, 0, 1, 1, 2, 2, 3, 3]
    for _ in range(3):
        for talk, home in zip(talks, homes, strict=True):
            talk += [rng.randrange(99) for _ in range(20)]
            route = routed(router, talk)
            assert (route.replica, route.num_missing < len(talk)) == (home, True)
            router.finished(route, 4)


def test_a_shared_prefix_moves_to_another_replica_when_its_holder_is_busier_than_it_is_worth() -> None:
    router = Router([100] * 2, block_size=SIZE, tokens_per_text=10)
    system = list(range(40))
    replicas = [routed(router, [*system, 50 + n, 60, 61, 62]).replica for n in range(8)]
    # 44 + 10 for the first; each further one adds 4 + 10 there, until that is more than twice the 40 shared tokens.
    assert replicas[:4] == [0, 0, 0, 1]
    assert abs(router.load(0) - router.load(1)) <= 4 + 10


def test_salts_match_only_their_own() -> None:
    router = Router([100] * 2, block_size=SIZE)
    prompt = list(range(40))
    mine = routed(router, prompt, b"salt:mine")
    router.finished(mine)
    assert routed(router, prompt, b"salt:yours").num_matched == 0
    assert routed(router, prompt).num_matched == 0
    again = routed(router, prompt, b"salt:mine")
    assert (again.replica, again.num_matched) == (mine.replica, 10)


def test_requests_at_once_spread_evenly() -> None:
    router, rng = Router([100] * 4, block_size=SIZE), Random(1)
    for _ in range(40):
        routed(router, [rng.randrange(99) for _ in range(30)])
    loads = [router.load(replica) for replica in range(4)]
    assert max(loads) - min(loads) <= 30 + 32


def test_of_many_replicas_the_busy_ones_are_avoided() -> None:
    router, rng = Router([100] * 1000, block_size=SIZE), Random(1)
    for _ in range(4000):
        routed(router, [rng.randrange(99) for _ in range(4)])
    loads = [router.load(replica) for replica in range(1000)]
    assert max(loads) <= 2 * 4 * (32 + 4)  # random choice alone gives three times the mean


def test_a_closed_replica_gets_nothing_and_is_forgotten() -> None:
    router = Router([100] * 2, block_size=SIZE)
    prompt = list(range(40))
    first = routed(router, prompt)
    router.close(first.replica)
    router.finished(first, 40)
    assert router.open_replicas == (1 - first.replica,)
    assert router.num_blocks(first.replica) == 0
    second = routed(router, prompt)
    assert (second.replica, second.num_matched) == (1 - first.replica, 0)
    assert router.route(names(prompt), 40, avoid={second.replica}) is None
    router.close(second.replica)
    assert router.route(names(prompt), 40) is None


def test_a_replica_that_comes_later_takes_what_the_others_are_too_busy_for() -> None:
    router = Router([100], block_size=SIZE, max_entries=60)
    prompt = list(range(40))
    assert routed(router, prompt).replica == 0
    assert router.open(100) == 1
    assert [routed(router, prompt).replica for _ in range(2)] == [0, 1]  # until it is busier than that is worth
    router.close(0)
    assert routed(router, prompt).num_matched == 10
    assert router.open(100) == 2  # not the number of the one that is gone, whose requests may still end
    assert router.open_replicas == (1, 2)
    with pytest.raises(ConfigError, match="capacity"):
        router.open(-1)


def test_what_a_pool_has_no_room_for_is_forgotten_longest_prefixes_first() -> None:
    router = Router([12], block_size=SIZE)
    first, second = list(range(40)), list(range(100, 140))
    routed(router, first)
    routed(router, second)
    assert router.num_blocks(0) == 12
    assert routed(router, second).num_matched == 10
    router = Router([12], block_size=SIZE)
    route = routed(router, first)
    router.finished(route, 5 * SIZE)  # its text lies in the pool, too
    assert router.num_blocks(0) <= 12
    assert routed(router, first).num_matched == 7


def test_a_prefix_that_all_hold_is_remembered_of_a_bounded_number() -> None:
    known = KnownPrefixes([100] * 100, max_entries=10**6)
    keys = landmarks(names(list(range(40))))
    for replica in range(100):
        known.note(replica, keys)
    assert sorted(known.matches(keys)) == list(range(68, 100))
    assert known.num_entries == 32 * len(keys)
    assert known.num_blocks(0) == 0


def test_memory_is_bounded() -> None:
    rng = Random(1)
    tenants = [[rng.randbytes(32) for _ in range(16)] for _ in range(100)]
    router = Router([10**6] * 16, max_entries=8_000)
    tracemalloc.start()
    try:
        for _ in range(1_000):
            hashes = tenants[rng.randrange(100)] + [rng.randbytes(32) for _ in range(48)]
            route = router.route(hashes, 2048)
            assert route is not None
            router.finished(route, 300)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 7_500 < router.num_entries <= 8_000
    assert used < 2 << 20  # 50 MB for the 200,000 of the default


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("capacities", []),
        ("capacities", "12"),
        ("capacities", [1, -1]),
        ("capacities", [True]),
        ("block_size", 0),
        ("tokens_per_text", -1),
        ("max_entries", 1.5),
        ("seed", "x"),
    ],
)
def test_values_are_checked(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Router(**{"capacities": [10], setting: value})
    assert caught.value.setting == setting


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=70)


class RouterMachine(RuleBasedStateMachine):
    """Routes prompts over few tokens, so that prefixes meet, and knows every prompt that each replica was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router([30, 30, 8, 0], block_size=SIZE, tokens_per_text=7, max_entries=60)
        self.live: list[tuple[Route, int]] = []
        self.sent: list[set[bytes]] = [set() for _ in range(4)]
        self.open = {0, 1, 2, 3}
        self.capacities = [30, 30, 8, 0]

    @precondition(lambda self: len(self.capacities) < 8)
    @rule(capacity=st.sampled_from([0, 8, 30]))
    def come(self, capacity: int) -> None:
        replica = self.router.open(capacity)
        assert replica == len(self.capacities)
        self.capacities.append(capacity)
        self.sent.append(set())
        self.open.add(replica)

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"a"]), avoid=st.sets(st.integers(0, 7)), texts=st.integers(0, 2))
    def send(self, tokens: list[int], salt: bytes, avoid: set[int], texts: int) -> None:
        hashes = names(tokens, salt)
        route = self.router.route(hashes, len(tokens), num_texts=texts, avoid=avoid)
        if not self.open - avoid:
            assert route is None
            return
        assert route is not None
        assert route.replica in self.open - avoid
        assert set(hashes[: route.num_matched]) <= self.sent[route.replica]
        assert route.num_missing == len(tokens) - route.num_matched * SIZE
        self.sent[route.replica] |= set(hashes)
        self.live.append((route, texts))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), generated=st.integers(0, 40))
    def go_on(self, data: st.DataObject, generated: int) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        route, _ = self.live[place]
        if data.draw(st.booleans()):
            self.router.started(route)
        else:
            self.router.finished(route, generated)
            self.router.finished(route, generated)
            del self.live[place]

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, len(self.capacities) - 1))
        self.router.close(replica)
        self.open.discard(replica)
        self.sent[replica].clear()

    @rule()
    def forget(self) -> None:
        self.router.forget()
        for each in self.sent:
            each.clear()

    @invariant()
    def loads_are_those_of_what_is_under_way(self) -> None:
        for replica in range(len(self.capacities)):
            here = [(route, texts) for route, texts in self.live if route.replica == replica]
            expected = sum(texts * 7 + (0 if route.has_started else route.num_missing) for route, texts in here)
            assert self.router.load(replica) == expected

    @invariant()
    def beliefs_are_bounded(self) -> None:
        assert set(self.router.open_replicas) == self.open
        assert self.router.num_entries <= 60
        for replica, capacity in enumerate(self.capacities):
            assert 0 <= self.router.num_blocks(replica) <= capacity

    @invariant()
    def whoever_holds_a_prefix_is_found_by_it(self) -> None:
        prefixes = self.router._prefixes
        for replica, held in enumerate(prefixes._held):
            assert sum(held.values()) == prefixes.num_blocks(replica)
            for key in held:
                assert isinstance(key, int) or replica in prefixes._holders[key]
        assert sum(map(len, prefixes._holders.values())) == sum(
            isinstance(key, bytes) for held in prefixes._held for key in held
        )


RouterMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRouter = RouterMachine.TestCase
