"""Finding the likeliest tokens against sorting everything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.candidates import argmax, likeliest, likeliest_from, select_rows
from paged_sdk.sampling.truncation import draw_greedy


def in_order(row: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.lexsort((np.arange(len(row)), -row))


@pytest.mark.parametrize(("vocab_size", "width"), [(5, 5), (100, 64), (4099, 64), (20_003, 256), (20_003, 20_003)])
def test_likeliest_are_the_head_of_the_sorted_row(vocab_size: int, width: int) -> None:
    logits = np.random.default_rng(0).permuted(np.tile(np.arange(vocab_size) - 99, (3, 1)), axis=1).astype(np.float32)
    values, tokens = likeliest(torch.tensor(logits), width)
    for index in range(3):
        assert tokens[index].tolist() == in_order(logits[index])[:width].tolist()
        assert values[index].tolist() == logits[index, tokens[index]].tolist()


@pytest.mark.parametrize(("vocab_size", "width"), [(50, 7), (4099, 64)])
def test_likeliest_holds_the_right_values_among_ties(vocab_size: int, width: int) -> None:
    logits = np.random.default_rng(1).integers(-5, 5, (4, vocab_size)).astype(np.float32)
    values, tokens = likeliest(torch.tensor(logits), width)
    for index in range(4):
        assert values[index].tolist() == np.sort(logits[index])[::-1][:width].tolist()
        assert logits[index, tokens[index]].tolist() == values[index].tolist()
        assert len(set(tokens[index].tolist())) == width


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False)),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_likeliest_from_is_the_sorted_row_down_to_a_threshold(row: npt.NDArray[np.float32], threshold: float) -> None:
    values, tokens = likeliest_from(torch.tensor(row), threshold)
    kept = int((row >= np.float32(threshold)).sum())
    assert tokens[:kept].tolist() == in_order(row)[:kept].tolist()
    assert values.tolist() == row[tokens].tolist()


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, -torch.inf], [0.0, -0.0, 0.0]])
    assert argmax(logits).tolist() == [1, 0, 0]


def test_select_rows() -> None:
    table = torch.arange(12.0).view(4, 3)
    for rows in ([0], [1, 2], [0, 1, 2, 3], [0, 2], [1, 3]):
        assert torch.equal(select_rows(table, rows), table[rows])


def test_a_device_is_not_asked_for_the_logit_of_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, :func:`argmax` has looked whether it is finite, and a place before the first ends everything."""
    monkeypatch.setattr("paged_sdk.sampling.truncation.argmax", lambda logits: np.array([4, NOT_DRAWN, 0]))
    assert draw_greedy(torch.empty(3, 9, device="meta")).tolist() == [4, NOT_DRAWN, 0]


def test_rows_without_a_finite_largest_logit_get_no_token() -> None:
    logits = torch.tensor([[1.0, 3, 2], [1, torch.nan, 2], [-torch.inf] * 3, [torch.inf, 0, 0], [-torch.inf, 0, 0]])
    assert draw_greedy(logits).tolist() == [1, NOT_DRAWN, NOT_DRAWN, NOT_DRAWN, 1]
