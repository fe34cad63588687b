"""Choosing tokens in Triton against numpy and the sampler's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels import sampling as ops
from paged_sdk.runner.truncation import Settings, draw_from_all

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.kernels.triton.sampling._TILE", 64)


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("vocab_size", [1, 64, 65, 300])
def test_the_likeliest_token(triton_device: torch.device, vocab_size: int) -> None:
    from paged_sdk.kernels.triton.sampling import argmax

    logits = random_logits(7, vocab_size).round()  # ties, also between tiles
    tokens = argmax(logits.to(triton_device))
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()
    assert torch.equal(ops.argmax(logits), tokens.cpu())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_without_a_token(triton_device: torch.device, bad: float) -> None:
    from paged_sdk.kernels.triton.sampling import argmax, draw

    logits = random_logits(4, 100)
    logits[1] = -torch.inf
    logits[2, 70] = bad
    logits[3, 5:] = -torch.inf
    ones = torch.ones(4)
    settings = ones, 0 * ones, ones.double() / 2
    moved = logits.to(triton_device)
    for tokens in (argmax(moved), ops.argmax(logits), ops.draw(logits, *settings)):
        assert (tokens.cpu() == ops.NOT_DRAWN).tolist() == [False, True, True, False]
    if bad != bad:  # weights of +inf overflow, of which the interpreter warns
        drawn = draw(moved, *(setting.to(triton_device) for setting in settings)).cpu()
        assert torch.equal(drawn, ops.draw(logits, *settings))


@pytest.mark.parametrize("vocab_size", [1, 64, 300])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_draws_are_the_samplers(triton_device: torch.device, vocab_size: int, min_p: float) -> None:
    """The same token for the same number: numbers that fall within rounding of a token's edge are not among these."""
    from paged_sdk.kernels.triton.sampling import draw

    num_rows = 24
    logits = random_logits(num_rows, vocab_size)
    uniforms = np.random.default_rng(0).random(num_rows)
    uniforms[:2] = 0, np.nextafter(1, 0)
    temperatures = np.linspace(0.3, 2, num_rows)
    params = [SamplingParams(temperature=float(each), min_p=min_p) for each in temperatures]
    expected = draw_from_all(logits.clone(), Settings.of(params, vocab_size), np.arange(num_rows), uniforms)
    settings = (
        torch.from_numpy(temperatures).float(),
        torch.full((num_rows,), min_p),
        torch.from_numpy(uniforms),
    )
    drawn = draw(logits.to(triton_device), *(setting.to(triton_device) for setting in settings))
    assert drawn.tolist() == expected.tolist()
    assert ops.draw(logits, *settings).tolist() == expected.tolist()


def test_draws_follow_the_distribution(triton_device: torch.device) -> None:
    """Evenly spaced numbers draw each token as often as its probability says, to one draw."""
    from paged_sdk.kernels.triton.sampling import draw

    num_draws = 60
    logits = random_logits(1, 130) / 6
    uniforms = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    rows = logits.expand(num_draws, -1)
    settings = torch.full((num_draws,), 0.7), torch.zeros(num_draws), uniforms
    drawn = draw(rows.to(triton_device), *(setting.to(triton_device) for setting in settings)).cpu()
    counts = drawn.bincount(minlength=130)
    expected = (logits[0].double() / 0.7).softmax(0) * num_draws
    assert (counts - expected).abs().max() <= 1


def test_no_rows(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.sampling import argmax, draw

    logits = torch.zeros(0, 10, device=triton_device)
    none = logits[:, 0]
    assert argmax(logits).shape == draw(logits, none, none, none.double()).shape == (0,)
