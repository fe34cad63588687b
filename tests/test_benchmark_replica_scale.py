"""The simulator of many replicas: its costs are the measured ones, and what must hold of replicas holds there."""

from __future__ import annotations

from itertools import count

import pytest
from attrs import evolve
from benchmarks.replica_scale import Figures, simulate
from benchmarks.replica_trace import QWEN, ChatRules, chats


def without_time(figures: Figures) -> Figures:
    return evolve(figures, router_us=0.0)


def test_costs_are_the_measured_ones() -> None:
    assert 1 / QWEN.step_seconds(1, 0, 0, 0) == pytest.approx(33.7, abs=0.1)
    assert 4 / QWEN.step_seconds(4, 0, 0, 0) == pytest.approx(97, abs=0.5)
    assert 16 / QWEN.step_seconds(16, 0, 0, 0) == pytest.approx(154, abs=0.5)
    assert 1 / QWEN.step_seconds(1, 4000, 0, 0) == pytest.approx(27.6, abs=0.2)
    for num_tokens, speed in ((1000, 287), (4000, 245)):
        assert num_tokens / QWEN.step_seconds(0, 0, num_tokens, num_tokens**2 / 2) == pytest.approx(speed, abs=0.5)


def test_chats_keep_to_the_rules() -> None:
    rules = ChatRules(tenants=4, chats_per_second=2.0)
    made = list(chats(rules, 500, seed=3))
    assert len(made) == pytest.approx(1000, abs=100)
    assert sum(each.turns_left for each in made) / len(made) == pytest.approx(4, abs=0.4)
    systems = {tuple(each.tokens) for each in made}
    assert len(systems) == 4
    assert all(200 <= len(each) <= 1200 for each in systems)
    shares = sorted(sum(tuple(each.tokens) == system for each in made) / len(made) for system in systems)
    assert shares[-1] == pytest.approx(0.48, abs=0.06)  # 1 of 1 + 1/2 + 1/3 + 1/4


def test_four_replicas_hit_as_one_big_cache_does() -> None:
    big = simulate(1, 0.5, 120, tenants=16, num_blocks=8192, speed=4.0, max_num_seqs=128)
    turn = count()
    routed, in_turn = (
        simulate(4, 0.5, 120, tenants=16, policy=policy) for policy in (None, lambda replicas: next(turn) % replicas)
    )
    assert routed.hit_rate >= 0.95 * big.hit_rate
    assert in_turn.hit_rate < 0.9 * big.hit_rate
    assert routed.first_p99 < in_turn.first_p99


def test_every_turn_ends_when_a_replica_dies() -> None:
    quiet = simulate(4, 0.5, 120, tenants=8)
    dying = simulate(4, 0.5, 120, tenants=8, deaths=[2])
    assert quiet.num_lost == 0
    assert 0 < dying.num_lost < 20
    assert dying.tokens_per_second > 0.8 * quiet.tokens_per_second
    assert dying.first_p50 < 3 * quiet.first_p50


def test_queues_stand_for_schedulers_and_the_same_seed_for_the_same_figures() -> None:
    exact, queues = (simulate(4, 0.76, 150, tenants=32, queues=way) for way in (False, True))
    assert queues.tokens_per_second == pytest.approx(exact.tokens_per_second, rel=0.03)
    assert queues.hit_rate == pytest.approx(exact.hit_rate, rel=0.01)
    assert queues.first_p50 == pytest.approx(exact.first_p50, rel=0.3)
    assert queues.pace_p99 == pytest.approx(exact.pace_p99, rel=0.3)
    assert without_time(simulate(4, 0.76, 150, tenants=32, queues=True)) == without_time(queues)
