"""Logprobs of raw logits on the host, natively and by torch, against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import encode, make_row

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import NumericalError
from paged_sdk.sampling.logprobs import make_logprob_tables
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.sampler import SampledRows, Sampler

pytestmark = pytest.mark.usefixtures("every_draw")

CPU = torch.device("cpu")


def naive_logprobs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    largest = wide.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - largest - np.log(np.exp(wide - largest).sum(axis=1, keepdims=True))
    return result


def check(
    entries: Sequence[RawLogprobs],
    logits: npt.NDArray[np.float32],
    rows: Sequence[int],
    tokens: Sequence[int],
    top_n: int,
) -> None:
    """Check the entries of pairs of a row and a token, up to float32's rounding and the tokens that tie for the last
    place.
    """
    expected, vocab_size = naive_logprobs(logits), logits.shape[1]
    # A sum of weights in the eight lanes of the narrowest vectors, the subtractions, and 2 units for each function.
    bound = 2.0**-24 * (vocab_size / 8 + 8)

    def is_near(found: float, logprob: float) -> bool:
        return found == logprob or abs(found - logprob) <= bound + 2.0**-23 * abs(logprob)

    assert len(entries) == len(rows)
    for entry, row, token in zip(entries, rows, tokens, strict=True):
        assert entry.token_id == token
        assert is_near(entry.logprob, expected[row, token]), (entry.logprob, expected[row, token])
        order = np.lexsort((np.arange(vocab_size), -logits[row]))[:top_n]
        listed = [each for each, _ in entry.top]
        assert len(set(listed)) == len(order) == len(listed)
        assert logits[row, listed].tolist() == logits[row, order].tolist()
        before_last = int((logits[row, order] > logits[row, order[-1]]).sum()) if top_n else 0
        assert listed[:before_last] == order[:before_last].tolist()
        assert listed[before_last:] == sorted(listed[before_last:])
        assert all(is_near(logprob, expected[row, each]) for each, logprob in entry.top)


def make_logits(num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


@pytest.mark.parametrize("vocab_size", [1, 17, 128, 1003, 49_152, 262_144])
@pytest.mark.parametrize("kind", ["normal", "wide", "flat", "ties", "peak", "banned", "one left"])
def test_as_float64(kind: str, vocab_size: int) -> None:
    logits = make_logits(3, vocab_size, {"wide": 40.0, "flat": 0.0}.get(kind, 3.0))
    if kind == "ties":
        logits = logits.round()
    elif kind == "peak":
        logits[:, vocab_size // 2] += 25
    elif kind == "banned":
        logits[:, vocab_size // 3 : vocab_size // 2] = -math.inf
    elif kind == "one left":
        logits[:, torch.arange(vocab_size) != vocab_size // 2] = -math.inf
    kept, rows = logits.clone(), [0, 2, 2, 1]
    tokens = [0, vocab_size // 2, vocab_size - 1, vocab_size // 3]
    for top_n in (0, 1, 20, 1024):
        table = make_logprob_tables(CPU)(logits, top_n, logits_stay=top_n > 1)
        check(table.entries(rows, tokens), logits.numpy(), rows, tokens, min(top_n, vocab_size))
    assert torch.equal(logits, kept)


def test_banned_tokens_stay_banned() -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, [3, 30]] = torch.tensor([1.0, 1.0])
    (entry,) = make_logprob_tables(CPU)(logits, 4).entries([0], [8])
    assert (entry.logprob, len(entry.top)) == (-math.inf, 4)
    assert [token for token, _ in entry.top[:2]] == [3, 30]
    assert [logprob for _, logprob in entry.top] == pytest.approx([-math.log(2)] * 2 + [-math.inf] * 2)


def test_a_certain_token_has_logprob_0() -> None:
    logits = torch.full((2, 300), -200.0)
    logits[0, 7] = 90.0
    logits[1] = 3e38 * torch.linspace(-1, 1, 300)
    entries = make_logprob_tables(CPU)(logits, 1).entries([0, 1], [7, 299])
    assert entries == [RawLogprobs(7, 0.0, ((7, 0.0),)), RawLogprobs(299, 0.0, ((299, 0.0),))]


@pytest.mark.parametrize("logits_stay", [False, True])
def test_rows_of_a_larger_tensor(logits_stay: bool) -> None:
    """A stride that is no multiple of a vector, and a first column that is not aligned to one."""
    wide = make_logits(40, 523)
    logits = wide[:, 5:505]
    assert not logits.is_contiguous()
    rows, tokens = list(range(40)), [13 * row % 500 for row in range(40)]
    entries = make_logprob_tables(CPU)(logits, 3, logits_stay=logits_stay).entries(rows, tokens)
    check(entries, logits.contiguous().numpy(), rows, tokens, 3)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    """On a grid, where ties are frequent."""
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 300)))
    grid = st.integers(-40, 40).map(lambda eighths: eighths / 8) | st.just(-math.inf)
    logits = data.draw(hnp.arrays(np.float32, shape, elements=grid, fill=grid))
    logits[np.isneginf(logits).all(axis=1), 0] = 0
    pair = st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1))
    pairs = data.draw(st.lists(pair, max_size=8))
    top_n = data.draw(st.integers(0, 12) | st.integers(0, 310))
    rows, tokens = [row for row, _ in pairs], [token for _, token in pairs]
    entries = make_logprob_tables(CPU)(torch.from_numpy(logits.copy()), top_n).entries(rows, tokens)
    check(entries, logits, rows, tokens, min(top_n, shape[1]))


def test_logits_may_be_overwritten() -> None:
    logits = make_logits(2, 700)
    expected = make_logprob_tables(CPU)(logits.clone(), 4).entries([0, 1], [5, 6])
    table = make_logprob_tables(CPU)(logits, 4)
    logits.fill_(-math.inf)
    assert table.entries([0, 1], [5, 6]) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_leave_others_alone(bad: float) -> None:
    logits = make_logits(3, 90)
    expected = make_logprob_tables(CPU)(logits[::2].clone(), 100).entries([0, 1], [5, 6])
    logits[1] = bad
    assert make_logprob_tables(CPU)(logits, 100).entries([0, 2], [5, 6]) == expected


BAD: dict[str, dict[str, Any]] = {"drawn": {"seed": 1}, "greedy": {"temperature": 0.0}}


@pytest.mark.parametrize("params", BAD.values(), ids=BAD)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_sampler_ends_only_the_requests_of_bad_rows(bad: float, params: dict[str, Any]) -> None:
    """Rows that no processor changes, of several widths and without logprobs, side by side."""
    logits, widths = make_logits(5, 300), (2, None, 7, 2, 2)
    rows = [make_row(SamplingParams(top_n_logprobs=top_n, **params), seq_id=i) for i, top_n in enumerate(widths)]
    logits[3, slice(None) if bad < 0 else slice(9, 10)] = bad

    def sample(indices: Sequence[int]) -> SampledRows:
        sampler = Sampler(300, CPU, default_processors(300, encode))
        own = [rows[index] for index in indices]
        return sampler.sample(logits[list(indices)].clone(), sampler.prepare(own))

    together = sample(range(5))
    assert isinstance(together.failed.pop(3), NumericalError)
    assert not together.failed
    assert (together.token_ids[3], together.logprobs[3]) == ([], None)
    for index in (0, 1, 2, 4):
        alone = sample([index])
        assert (together.token_ids[index], together.logprobs[index]) == (alone.token_ids[0], alone.logprobs[0])
        entries, top_n = together.logprobs[index], widths[index]
        assert (entries is None) == (top_n is None)
        if entries is not None and top_n is not None:
            (token,) = together.token_ids[index]
            check(entries, logits[index : index + 1].numpy(), [0], [token], top_n)
