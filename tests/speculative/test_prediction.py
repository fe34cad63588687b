"""How much of a prediction is said to have come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.speculative.prediction import PredictionCount

PREDICTION = list(range(100, 160))
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def counted(prediction: list[int], text: list[int]) -> tuple[int, int]:
    count = PredictionCount(prediction)
    count.note(text)
    return count.num_accepted, count.num_rejected


def test_a_text_as_predicted() -> None:
    assert counted(PREDICTION, PREDICTION) == (60, 0)
    assert counted(PREDICTION, PREDICTION[:20]) == (20, 40)


def test_an_edit_costs_what_it_replaces() -> None:
    assert counted(PREDICTION, [*PREDICTION[:20], 7, *PREDICTION[21:]]) == (59, 1)
    assert counted(PREDICTION, [*PREDICTION[:20], 7, 8, 9, *PREDICTION[20:]]) == (59, 1)  # the first after it is lost


def test_another_text() -> None:
    assert counted(PREDICTION, list(range(60))) == (0, 60)


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_it_depends_on_the_tokens_alone(prediction: list[int], text: list[int], size: int) -> None:
    pieces = PredictionCount(prediction)
    for start in range(0, len(text), size):
        pieces.note(text[start : start + size])
    accepted, rejected = counted(prediction, text)
    assert (pieces.num_accepted, pieces.num_rejected) == (accepted, rejected)
    assert 0 <= accepted <= len(text)
    assert len(prediction) - accepted <= rejected <= len(prediction)
