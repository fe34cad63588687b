"""Samples the token of each row on the device, greedily or at random, without waiting for the device.

A draw inverts the CDF over the tokens kept by top-k and min-p, in the order of token ids, at a random number that
depends only on the row's stream and position. So results do not depend on the batch.

Top-p uses rejection, which draws from the same distribution: if the tokens likelier than the drawn one already sum to
the share p, one of these is drawn instead, with another random number. The first draw is accepted with a probability of
at least p, and checking it only needs the sum over likelier tokens, whereas finding the top-p threshold takes several
passes if the distribution is flat. The method is that of Xing et al., "Sorting-free GPU kernels for LLM sampling"
(FlashInfer, 2025).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.draw_settings import NEXT_TRY, DrawSettings
from paged_sdk.kernels.fallback import device_of, runs_on_triton

__all__ = ["NOT_DRAWN", "argmax", "argmax_reference", "draw", "draw_reference", "uniforms"]

NOT_DRAWN = -1
"""Returned instead of a token id if no token can be sampled: all logits are -inf, or one is NaN or +inf."""

# SplitMix64's constants, as torch's signed integers.
_GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR: Final = 0x94D049BB133111EB - 2**64


def argmax(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row; the lowest id if several are equal.

    :param logits: ``[N, V]`` float32, V at least 1, columns adjacent
    :returns: ``[N]`` int64, :data:`NOT_DRAWN` where the largest logit is not finite
    :raises ConfigError: shape or dtype do not fit
    """
    check_tensor("logits", logits, ("N", "V"), (torch.float32,), logits.device)
    if runs_on_triton("argmax", logits):
        from paged_sdk.kernels.triton import sampling as triton_kernels

        with device_of(logits):
            return triton_kernels.argmax(logits)
    return argmax_reference(logits)


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Sample a token of each row from the tokens that the settings keep, with weights ``exp(logit / temperature)``.

    :param logits: ``[N, V]`` float32, V at least 1, columns adjacent
    :returns: ``[N]`` int64, :data:`NOT_DRAWN` where no token can be sampled
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    check_tensor("logits", logits, ("N", "V"), (torch.float32,), logits.device)
    settings.check(len(logits), logits.device)
    if runs_on_triton("draw", logits):
        from paged_sdk.kernels.triton import sampling as triton_kernels

        with device_of(logits):
            return triton_kernels.draw(logits, settings)
    return draw_reference(logits, settings)


def argmax_reference(logits: Tensor) -> Tensor:
    """Implement :func:`argmax` with torch operations."""
    values, tokens = logits.max(dim=-1)
    return torch.where(values.isfinite(), tokens, NOT_DRAWN)


def draw_reference(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Implement :func:`draw` with torch operations; waits for the device to check whether all draws are accepted."""
    likeliest = argmax_reference(logits)
    is_fixed = (settings.temperature == 0) | (likeliest == NOT_DRAWN)
    temperature = torch.where(is_fixed, 1.0, settings.temperature)[:, None]
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp().double()
    last = settings.top_k[:, None].long().clamp(max=logits.shape[-1]) - 1
    kept = logits >= logits.sort(dim=-1, descending=True).values.gather(-1, last)
    enough = torch.where(settings.top_p < 1, settings.top_p * torch.where(kept, weights, 0.0).sum(dim=-1), torch.inf)
    kept &= weights >= settings.min_p[:, None]
    positions = settings.positions
    while True:
        drawn = _inverse_cdf(torch.where(kept, weights, 0.0), uniforms(settings.streams, positions))
        likelier = kept & (logits > logits.gather(-1, drawn))
        above = torch.where(likelier, weights, 0.0).sum(dim=-1)
        is_bad = ~is_fixed & (above > 0) & (above >= enough)
        if not is_bad.any():
            return torch.where(is_fixed, likeliest, drawn[:, 0])
        kept = torch.where(is_bad[:, None], likelier, kept)
        positions = torch.where(is_bad, positions + NEXT_TRY, positions)


def _inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return ``[N, 1]``: the token of each row where the cumulative weight passes the row's random number in [0, 1)."""
    cumulative = weights.cumsum(dim=-1)
    targets = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp(max=weights.shape[-1] - 1)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Return random numbers in [0, 1) with 53 bits, each at a position in a stream.

    The generator is SplitMix64 (Steele, Lea and Flood, 2014).

    :param streams: ``[N]`` int64
    :param positions: ``[N]`` int64, at least 0
    :returns: ``[N]`` float64
    """
    bits = streams + _GAMMA * (positions + 1)
    bits = (bits ^ _shift(bits, 30)) * _FIRST_FACTOR
    bits = (bits ^ _shift(bits, 27)) * _SECOND_FACTOR
    return _shift(bits ^ _shift(bits, 31), 11).double() * 2.0**-53


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right logically: zeros enter from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
