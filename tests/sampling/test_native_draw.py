"""Drawing tokens in one native call, against naive float64 sampling and torch's way of drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from naive_sampler import naive_distribution, naive_uniform
from rows import make_row

from native_weights import every_level, library, needs_library
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.draw import NativeDraw
from paged_sdk.kernels.native.structures_sampling import DRAW_SETTINGS
from paged_sdk.kernels.sampling import uniforms
from paged_sdk.sampling.native_draw import NativeTokenDraw
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.torch_draw import TorchTokenDraw

pytestmark = needs_library

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.5, "min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 5},
    {"top_k": 300, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"temperature": 4.0, "top_p": 0.97},
    {"temperature": 1e30, "top_p": 0.5},
    {"temperature": 1e-6, "top_p": 0.9},
    {"top_p": 1 - 1e-12},
    {"min_p": 1e-50},  # nothing in float32
]


def make_rows(settings: Sequence[Mapping[str, Any]], seed: int = 3, num_samples: int = 1) -> list[SampleRow]:
    """Make a row for each setting, at positions of their own."""
    return [
        make_row(
            SamplingParams(seed=seed, **each),
            [5] * place,
            seq_id=place,
            choice_index=place % 2,
            num_samples=num_samples,
        )
        for place, each in enumerate(settings)
    ]


def make_logits(num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


def draw_all(
    draw: NativeTokenDraw | TorchTokenDraw,
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    proposed: Mapping[int, npt.NDArray[np.int64]] | None = None,
) -> list[list[int]]:
    return draw.draw(logits.clone(), rows, range(len(rows)), proposed or {})


@every_level
@pytest.mark.parametrize(("vocab_size", "rounding"), [(1, 0), (7, 0), (127, 0), (128, 2), (1003, 0), (5000, 4)])
def test_as_naive_float64(isa: str, vocab_size: int, rounding: int) -> None:
    logits = make_logits(len(SETTINGS), vocab_size)
    if rounding:
        logits = (logits * rounding).round() / rounding  # many ties
    logits[:, vocab_size // 3 : vocab_size // 2] = -math.inf
    rows = make_rows(SETTINGS, num_samples=4)
    found = draw_all(NativeTokenDraw(library(isa)), logits, rows)
    num_clear = 0
    for row, own, tokens in zip(rows, logits.numpy().astype(np.float64), found, strict=True):
        params = row.request.sampling
        assert len(tokens) == row.num_samples
        if params.is_greedy:
            assert tokens == [int(own.argmax())] * 4
            continue
        distribution = naive_distribution(own, row)
        assert params.seed is not None
        for sample, token in enumerate(tokens):
            uniform = naive_uniform(params.seed, row.choice_index + sample, row.num_output_tokens)
            expected, margin = distribution.draw(uniform)
            if min(margin, distribution.margin) > 1e-5:  # float32 may fall to the other side of what is nearer
                assert token == expected, params
                num_clear += 1
    assert num_clear > 25


@every_level
@pytest.mark.parametrize(("vocab_size", "scale"), [(49_155, 3.0), (20_000, 0.5), (20_000, 0.0)])
def test_as_torch_draws(isa: str, vocab_size: int, scale: float) -> None:
    """Peaked rows, flat ones of which top-p keeps thousands of tokens, and rows of nothing but ties."""
    logits = make_logits(len(SETTINGS), vocab_size, scale)
    rows = make_rows(SETTINGS, num_samples=3)
    found = draw_all(NativeTokenDraw(library(isa)), logits, rows)
    expected = draw_all(TorchTokenDraw(), logits, rows)
    pairs = [pair for own in zip(found, expected, strict=True) for pair in zip(*own, strict=True)]
    assert len(pairs) == 3 * len(SETTINGS)
    # A sum's last bits decide now and then.
    assert sum(one == other for one, other in pairs) >= len(pairs) - 2


@pytest.mark.parametrize("vocab_size", [40, 4000])
def test_a_token_does_not_depend_on_its_batch(vocab_size: int) -> None:
    logits = make_logits(len(SETTINGS), vocab_size)
    draw, rows = NativeTokenDraw(library()), make_rows(SETTINGS, num_samples=2)
    together = draw_all(draw, logits, rows)
    for index, row in enumerate(rows):
        assert draw_all(draw, logits[index : index + 1], [row]) == [together[index]]
    wanted = range(0, len(rows), 3)
    assert draw.draw(logits, rows, wanted, {}) == [together[index] for index in wanted]
    draw.forget([0, 1, 99])
    assert set(draw._settings) == set(range(2, len(rows)))
    assert draw_all(draw, logits, rows) == together


@every_level
def test_proposals_that_are_kept_are_taken(isa: str) -> None:
    settings = [each for each in SETTINGS if each.get("temperature") != 0]
    logits = (make_logits(len(settings), 900) * 2).round() / 2
    banned = 450
    logits[:, banned:] = -math.inf
    native, by_torch = NativeTokenDraw(library(isa)), TorchTokenDraw()
    for seed in range(20):
        rows = make_rows(settings, seed, num_samples=1 + seed % 3)
        proposed = native.propose(logits, rows, range(len(rows)), 4)
        for one, other in zip(proposed, by_torch.propose(logits, rows, range(len(rows)), 4), strict=True):
            assert one.shape == (1 + seed % 3, 4)
            assert (one == other).mean() > 0.9
        some = {index: each for index, each in enumerate(proposed) if index % 4}
        some[1] = np.full_like(some[1], -1)
        for each in some.values():
            each[:, 0] = banned + seed
        found, expected = draw_all(native, logits, rows, some), draw_all(by_torch, logits, rows, some)
        for index, (tokens, others) in enumerate(zip(found, expected, strict=True)):
            assert tokens == others
            assert max(tokens) < banned
            if settings[index].keys() <= {"temperature"} and index % 4 > 1:
                assert tokens == proposed[index][:, 1].tolist()


@every_level
@pytest.mark.parametrize("vocab_size", [5, 16, 300])
def test_rows_from_which_nothing_can_be_drawn(isa: str, vocab_size: int) -> None:
    draw = NativeTokenDraw(library(isa))
    for settings, bad in product(SETTINGS, (math.nan, -math.nan, math.inf, None)):
        logits = make_logits(3, vocab_size)
        if bad is None:
            logits[1] = -math.inf
        else:
            logits[1, vocab_size - 1] = bad
        rows = make_rows([settings] * 3, num_samples=2)
        good = draw_all(draw, logits[::2], rows[::2])
        assert draw_all(draw, logits, rows) == [good[0], [], good[1]]
        assert draw.propose(logits, rows, [1], 3)[0].tolist() == [[-1] * 3] * 2


def stream_of_bits(bits: int) -> int:
    """Return the stream whose first number has these bits, by SplitMix64 backwards."""

    def unshift(value: int, shift: int) -> int:
        result = value
        for _ in range(64 // shift + 1):
            result = value ^ (result >> shift)
        return result

    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        bits = unshift(bits, shift) * pow(factor, -1, 2**64) % 2**64
    return (unshift(bits, 30) - 0x9E3779B97F4A7C15) % 2**64


@every_level
def test_a_draw_never_leaves_what_is_kept(isa: str) -> None:
    """The least and the largest number, beside tokens whose weights are below the smallest normal float."""
    draw = NativeDraw(library(isa))
    logits = torch.full((1, 300), -200.0)
    logits[0, [7, 150, 290]] = torch.tensor([1.0, 0.5, 0.0])
    streams = np.array([stream_of_bits(0), stream_of_bits(2**64 - 1)], np.uint64).view(np.int64)
    assert uniforms(torch.from_numpy(streams), torch.zeros(2, dtype=torch.int64)).tolist() == [0, 1 - 2**-53]
    for top_k, top_p, min_p in ((300, 1.0, 0.0), (3, 1.0, 0.0), (300, 0.999, 0.0), (300, 1.0, 1e-4)):
        settings = np.array([(0, 1.0, top_p, min_p, top_k)], DRAW_SETTINGS)
        tokens = draw(logits, settings, np.array([2]), streams, np.zeros(2, np.int64)).tolist()
        assert tokens == [7, 290]


def test_no_rows_and_no_draws() -> None:
    draw = NativeTokenDraw(library())
    assert draw.draw(torch.empty(0, 20), [], [], {}) == []
    assert draw.draw(torch.empty(2, 20), make_rows([{}, {}]), [], {}) == []


def test_what_does_not_fit_is_refused() -> None:
    draw = NativeTokenDraw(library())
    for wrong in (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, 2).T):
        with pytest.raises(ConfigError, match="logits"):
            draw_all(draw, wrong, make_rows([{}, {}]))
