"""Choosing tokens on the device, without sorting: the likeliest, or one drawn with temperature and min-p.

As in :mod:`paged_sdk.runner.truncation`, a draw is the inverse CDF over the vocabulary in the order of token ids, at a
uniform number that the caller gives: results do not depend on the batch, and are the same again for the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.fallback import log_fallback, why_not_triton

__all__ = ["NOT_DRAWN", "argmax", "argmax_reference", "draw", "draw_reference"]

NOT_DRAWN = -1
"""In place of a token id, where there is nothing to choose: all logits are -inf, or one is NaN or +inf."""


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id among equals.

    :param logits: ``[N, V]`` float32, V at least 1, columns adjacent
    :returns: ``[N]`` int64, :data:`NOT_DRAWN` where the largest logit is not finite
    :raises ConfigError: shape or dtype do not fit
    """
    check_tensor("logits", logits, ("N", "V"), (torch.float32,), logits.device)
    if (reason := why_not_triton(logits)) is None:
        from paged_sdk.kernels.triton import sampling as triton_kernels

        return triton_kernels.argmax(logits)
    log_fallback("argmax", reason)
    return argmax_reference(logits)


def draw(logits: Tensor, temperature: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each row, drawn by weight ``exp((logit - largest) / temperature)`` from those of weight >= ``min_p``.

    :param logits: ``[N, V]`` float32, V at least 1, columns adjacent
    :param temperature: ``[N]`` float32, above 0
    :param min_p: ``[N]`` float32, 0 to 1
    :param uniforms: ``[N]`` float64 in [0, 1)
    :returns: ``[N]`` int64, :data:`NOT_DRAWN` where there is nothing to choose
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    check_tensor("logits", logits, ("N", "V"), (torch.float32,), logits.device)
    check_tensor("temperature", temperature, (len(logits),), (torch.float32,), logits.device)
    check_tensor("min_p", min_p, (len(logits),), (torch.float32,), logits.device)
    check_tensor("uniforms", uniforms, (len(logits),), (torch.float64,), logits.device)
    if (reason := why_not_triton(logits)) is None:
        from paged_sdk.kernels.triton import sampling as triton_kernels

        return triton_kernels.draw(logits, temperature, min_p, uniforms)
    log_fallback("draw", reason)
    return draw_reference(logits, temperature, min_p, uniforms)


def argmax_reference(logits: Tensor) -> Tensor:
    """:func:`argmax` by torch's operations."""
    values, tokens = logits.max(dim=-1)
    return torch.where(values.isfinite(), tokens, NOT_DRAWN)


def draw_reference(logits: Tensor, temperature: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """:func:`draw` by torch's operations."""
    largest = logits.amax(dim=-1, keepdim=True)
    weights = ((logits - largest) / temperature[:, None]).exp()
    weights = torch.where(weights >= min_p[:, None], weights, 0.0)
    cumulative = weights.double().cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return torch.where(largest[:, 0].isfinite(), tokens, NOT_DRAWN)
