"""Computing logprobs in one native call, on every instruction-set level, against float64."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pytest
import torch
from test_logprobs import make_logits, naive_logprobs

from native_weights import every_level, library, needs_library
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.logprobs import NativeLogprobs

pytestmark = needs_library

BOUND: Final = 1.5e-6
"""An exponential is right to 2 units in the last place and 8e-8 per unit of its exponent, of which likely tokens have 8
or less; a group's sum is rounded 12 times, half a unit each. All else is float64."""


@every_level
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 127, 128, 129, 1003, 49_152, 262_144])
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "banned"])
def test_as_float64(isa: str, kind: str, vocab_size: int) -> None:
    """Of ties for the last place, the first are listed."""
    logits = make_logits(2, vocab_size, 40.0 if kind == "wide" else 3.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "banned":
        logits[:, : vocab_size - 3] = -math.inf
    expected = naive_logprobs(logits.numpy())
    tokens = sorted({0, vocab_size // 2, vocab_size - 1})
    rows = [index % 2 for index in range(len(tokens))]
    native = NativeLogprobs(library(isa))
    for top_n in sorted({0, 1, min(7, vocab_size), min(1024, vocab_size)}):
        chosen, top_tokens, top_logprobs = native(logits, top_n, rows, tokens)
        np.testing.assert_allclose(chosen, expected[rows, tokens], rtol=1e-15, atol=BOUND)
        listed = np.array(top_tokens).reshape(2, top_n)
        for row in range(2):
            order = np.lexsort((np.arange(vocab_size), -logits[row].numpy()))
            assert listed[row].tolist() == order[:top_n].tolist()
        found = np.array(top_logprobs).reshape(2, top_n)
        np.testing.assert_allclose(found, np.take_along_axis(expected, listed.astype(int), 1), rtol=1e-15, atol=BOUND)


@every_level
def test_logprobs_are_never_above_0(isa: str) -> None:
    """One token beside many that weigh next to nothing, whose sum is no different in float32."""
    logits = torch.full((1, 50_000), -20.0)
    logits[0, 1234] = 5.0
    chosen, _, _ = NativeLogprobs(library(isa))(logits, 0, [0], [1234])
    assert -1e-6 < chosen[0] <= 0.0


@every_level
@pytest.mark.parametrize("vocab_size", [5, 16, 300])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, None])
def test_bad_rows_have_no_logprobs(isa: str, vocab_size: int, bad: float | None) -> None:
    logits = make_logits(3, vocab_size)
    native = NativeLogprobs(library(isa))
    good = native(logits[::2], 4, [0, 1], [1, 2])
    if bad is None:
        logits[1] = -math.inf
    else:
        logits[1, vocab_size - 1] = bad
    chosen, top_tokens, top_logprobs = native(logits, 4, [0, 1, 2], [1, 1, 2])
    assert np.isnan([chosen[1], *top_logprobs[4:8]]).all()
    assert top_tokens[4:8] == [0, 1, 2, 3]
    del chosen[1], top_tokens[4:8], top_logprobs[4:8]
    assert (chosen, top_tokens, top_logprobs) == good


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_does_not_depend_on_its_batch(num_threads: int) -> None:
    logits = make_logits(70, 3001)
    native, rows = NativeLogprobs(library()), list(range(70))
    tokens = [41 * row for row in rows]
    chosen, top_tokens, top_logprobs = native(logits, 6, rows, tokens, num_threads=num_threads)
    for row in rows:
        alone = native(logits[row : row + 1], 6, [0], [tokens[row]], num_threads=1)
        of_row = slice(6 * row, 6 * row + 6)
        assert alone == ([chosen[row]], top_tokens[of_row], top_logprobs[of_row])


def test_no_rows_and_no_pairs() -> None:
    native = NativeLogprobs(library())
    assert native(torch.empty(0, 20), 3, [], []) == ([], [], [])
    chosen, top_tokens, top_logprobs = native(torch.zeros(1, 2), 2, [], [])
    assert (chosen, top_tokens) == ([], [0, 1])
    assert top_logprobs == pytest.approx([-math.log(2)] * 2)


def test_what_does_not_fit_is_refused() -> None:
    native = NativeLogprobs(library())
    for wrong in (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, 2).T):
        with pytest.raises(ConfigError, match="logits"):
            native(wrong, 1, [0], [1])
    for rows, tokens in (([1], [0]), ([-1], [0]), ([0], [4]), ([0], [-1]), ([0], [])):
        with pytest.raises(AssertionError):
            native(torch.ones(1, 4), 1, rows, tokens)
    with pytest.raises(AssertionError):
        native(torch.ones(1, 4), 5, [0], [0])
