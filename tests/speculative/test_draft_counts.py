"""How many drafts are chosen, against all ways to choose."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.speculative.draft_counts import MARGIN, draft_counts

MAY_LOSE = 3.0
RATES = st.lists(st.floats(0.01, 0.99), max_size=4)


def rate(chances: list[list[float]], counts: tuple[int, ...], slope: float) -> float:
    tokens = len(chances) + sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
    return tokens / (1 + slope * sum(counts))


@given(st.lists(RATES, min_size=1, max_size=3), st.floats(0.01, 1.0))
def test_no_other_choice_gives_more_tokens_per_second(rates: list[list[float]], slope: float) -> None:
    chances = [list(accumulate(row, mul)) for row in rates]
    num_texts = len(chances)
    counts = draft_counts(chances, lambda num_tokens: 1 + slope * (num_tokens - num_texts), MAY_LOSE)
    choices = product(*(range(len(row) + 1) for row in chances))
    best = max(rate(chances, each, slope) for each in choices if slope * sum(each) <= MAY_LOSE)
    found = rate(chances, tuple(counts), slope)
    if any(counts):
        assert found == pytest.approx(best)
        assert found > num_texts * MARGIN
    else:
        assert best <= num_texts * MARGIN + 1e-9


def test_before_steps_were_timed_there_are_no_drafts() -> None:
    assert draft_counts([[0.9, 0.8]], lambda _: 0.0, MAY_LOSE) == [0]


def test_what_one_more_token_costs_decides() -> None:
    chances = [[0.9, 0.8, 0.7, 0.6], [0.2, 0.1]]
    assert draft_counts(chances, lambda _: 1.0, MAY_LOSE) == [4, 2]
    assert draft_counts(chances, lambda num_tokens: float(num_tokens), MAY_LOSE) == [0, 0]


def test_no_step_may_lose_more_than_is_left() -> None:
    chances = [[1.0] * 100 for _ in range(4)]

    def seconds(num_tokens: int) -> float:
        return 1.0 + 0.125 * (num_tokens - 4)

    assert [sum(draft_counts(chances, seconds, left)) for left in (3.0, 1.5, 0.5, 0.1, 0.0)] == [24, 12, 4, 0, 0]


def test_the_time_of_making_drafts_may_be_lost_too() -> None:
    assert draft_counts([[1.0] * 10], lambda _: 1.0, 1.0, lambda ahead: 0.25 * ahead) == [4]
