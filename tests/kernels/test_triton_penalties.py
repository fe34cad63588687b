"""Penalties in Triton and by torch's operations, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels import penalties as ops
from paged_sdk.kernels.penalty_settings import PenaltySettings

pytest.importorskip("triton")

NUM_SEATS, VOCAB_SIZE = 5, 150
SEATS = [3, -1, 0, 4]


@pytest.fixture(params=["triton", "torch"])
def kernels(request: pytest.FixtureRequest, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return functions with ``penalize`` and ``count``, the former by tiles of which a row has several."""
    from paged_sdk.kernels.triton import penalties

    monkeypatch.setattr(penalties, "_TILE", 64)
    return penalties if request.param == "triton" else ops


@pytest.fixture
def to(request: pytest.FixtureRequest, kernels: Any, triton_device: torch.device) -> Callable[[Tensor], Tensor]:
    """Move to the device where the functions run."""
    return lambda tensor: tensor if kernels is ops else tensor.to(triton_device)


def settings_on(to: Callable[[Tensor], Tensor], seats: list[int] = SEATS) -> PenaltySettings:
    return PenaltySettings(
        to(torch.tensor(seats, dtype=torch.int64)),
        to(torch.tensor([1.3, 2.0, 0.7, 1.0][: len(seats)])),
        to(torch.tensor([0.5, 1.0, 0.0, -0.25][: len(seats)])),
        to(torch.tensor([0.0, 1.0, 0.75, 2.0][: len(seats)])),
    )


def random_occurrences() -> Tensor:
    """Let a tenth of the tokens occur, in every way."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 8, (NUM_SEATS, VOCAB_SIZE), generator=generator, dtype=torch.int32)
    return counts * (torch.rand(NUM_SEATS, VOCAB_SIZE, generator=generator) < 0.1)


def penalized(logits: npt.NDArray[np.float64], occurrences: Tensor, settings: PenaltySettings) -> Tensor:
    """Compute penalties token by token."""
    columns = (settings.seats, settings.repetition, settings.frequency, settings.presence)
    result = logits.copy()
    rows = zip(*(each.tolist() for each in columns), strict=True)
    for row, (seat, repetition, frequency, presence) in enumerate(rows):
        for token in range(VOCAB_SIZE):
            counted = int(occurrences[seat, token]) if seat >= 0 else 0
            in_output, in_prompt = divmod(counted, 2)
            if in_output or in_prompt:
                logit = logits[row, token]
                logit = logit / repetition if logit > 0 else logit * repetition
                result[row, token] = logit - frequency * in_output - (presence if in_output else 0.0)
    return torch.from_numpy(result)


def test_penalties_are_those_of_numpy(kernels: Any, to: Callable[[Tensor], Tensor]) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 4
    occurrences, settings = random_occurrences(), settings_on(to)
    given, counted = to(logits.clone()), to(occurrences.clone())
    kernels.penalize(given, counted, settings)
    expected = penalized(logits.double().numpy(), occurrences, settings)
    assert (expected != logits).sum() > 20
    torch.testing.assert_close(given.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(given.cpu()[1], logits[1])
    assert torch.equal(counted.cpu(), occurrences)


def test_logits_that_are_not_finite_stay_so(kernels: Any, to: Callable[[Tensor], Tensor]) -> None:
    logits = torch.full((1, VOCAB_SIZE), torch.nan)
    logits[0, ::2] = -torch.inf
    given = to(logits.clone())
    kernels.penalize(given, to(torch.full((1, VOCAB_SIZE), 3, dtype=torch.int32)), settings_on(to, [0]))
    torch.testing.assert_close(given.cpu(), logits, equal_nan=True)


def test_what_was_sampled_is_counted(kernels: Any, to: Callable[[Tensor], Tensor]) -> None:
    """In the rows' own seats; not where nothing was sampled, nor where there are no penalties."""
    occurrences, settings = random_occurrences(), settings_on(to)
    counted, expected = to(occurrences.clone()), occurrences.clone()
    for tokens in ([7, 5, VOCAB_SIZE - 1, 0], [7, 5, -1, 3]):
        kernels.count(counted, settings, to(torch.tensor(tokens)))
        for seat, token in zip(SEATS, tokens, strict=True):
            if seat >= 0 and token >= 0:
                expected[seat, token] += 2
    assert torch.equal(counted.cpu(), expected)


def test_no_rows(kernels: Any, to: Callable[[Tensor], Tensor]) -> None:
    occurrences, settings = to(random_occurrences()), settings_on(to, [])
    kernels.penalize(to(torch.empty(0, VOCAB_SIZE)), occurrences, settings)
    kernels.count(occurrences, settings, to(torch.empty(0, dtype=torch.int64)))
    assert torch.equal(occurrences.cpu(), random_occurrences())


def test_what_does_not_fit_is_refused() -> None:
    logits, occurrences, settings = torch.randn(4, VOCAB_SIZE), random_occurrences(), settings_on(lambda tensor: tensor)
    with pytest.raises(ConfigError, match="occurrences"):
        ops.penalize(logits[:, 1:].contiguous(), occurrences, settings)
    with pytest.raises(ConfigError, match="logits"):
        ops.penalize(logits.half(), occurrences, settings)
    with pytest.raises(ConfigError, match="seats"):
        ops.penalize(logits[:3], occurrences, settings)
    with pytest.raises(ConfigError, match="tokens"):
        ops.count(occurrences, settings, torch.zeros(4, dtype=torch.int32))
