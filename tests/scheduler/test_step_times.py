"""What is known of the times of steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.scheduler.step_times import MAX_AGE, NUM_SAMPLES, StepTimes


def noted(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.note(num_tokens, seconds)
    return times


def test_nothing_is_expected_before_a_step() -> None:
    assert StepTimes().expected(3) == 0
    assert StepTimes().nearest(3) is None


def test_an_interrupted_step_does_not_show() -> None:
    times = noted(*((1, 1.0) for _ in range(NUM_SAMPLES)), (1, 50.0))
    assert times.expected(1) == times.nearest(1) == 1.0


def test_what_lies_between_is_interpolated_and_what_lies_beyond_is_guessed_up_to_a_bound() -> None:
    times = noted((1, 1.0), (5, 2.0))
    assert times.expected(3) == 1.5
    assert times.expected(10) == pytest.approx(2.0 + 5 * 0.25)
    assert times.expected(11) == math.inf
    assert noted((1, 1.0)).expected(5) == pytest.approx(1.8)
    assert noted((1, 1.0)).expected(6) == math.inf


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 1.0)), min_size=1, max_size=30))
def test_more_tokens_never_take_less(steps: list[tuple[int, float]]) -> None:
    times = noted(*steps)
    expected = [times.expected(num_tokens) for num_tokens in range(1, 200)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(expected))
    assert expected[0] * (1 + 1e-9) >= min(seconds for _, seconds in steps)  # a mean of equal numbers is rounded


def test_fewer_tokens_take_no_longer_than_more_did() -> None:
    assert noted((1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)).expected(2) == 2.0


def test_a_time_that_is_not_seen_again_is_forgotten() -> None:
    times = noted((1, 1.0), (5, 50.0))
    for _ in range(2 * MAX_AGE):
        times.note(1, 1.0)
    assert times.expected(5) == pytest.approx(1.8)


def test_a_forgotten_time_is_replaced_by_two_steps() -> None:
    times = noted(*((2, 1.0) for _ in range(NUM_SAMPLES)))
    times.forget(2)
    times.note(2, 5.0)
    times.note(2, 5.0)
    times.note(2, 5.0)
    assert times.nearest(2) == 5.0


def test_what_is_cleared_is_unknown() -> None:
    times = StepTimes()
    times.note(4, 0.5)
    assert times.expected(4) == times.nearest(4) == 0.5
    times.clear()
    assert times.nearest(4) is None
    assert times.expected(4) == 0.0
