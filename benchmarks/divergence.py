"""Measure how far a model's distributions are from a reference's."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Divergence", "divergence"]

_TILE = 64


@frozen(kw_only=True)
class Divergence:
    """Holds the divergence over the positions of a text.

    :ivar mean_kl: Kullback-Leibler divergence from the reference, in nats
    :ivar p99_kl: the Kullback-Leibler divergence that 99 % of the positions are below
    :ivar top1: share of positions whose likeliest token is the reference's
    """

    mean_kl: float
    p99_kl: float
    top1: float


def divergence(reference: Tensor, logits: Tensor) -> Divergence:
    """Compare logits, each ``[num_tokens, vocab_size]``, with sums in float64."""
    assert reference.shape == logits.shape, (reference.shape, logits.shape)
    kl = torch.cat(
        [_kl(*tiles) for tiles in zip(torch.split(reference, _TILE), torch.split(logits, _TILE), strict=True)]
    )
    agrees = reference.argmax(-1) == logits.argmax(-1)
    return Divergence(mean_kl=float(kl.mean()), p99_kl=float(kl.quantile(0.99)), top1=float(agrees.double().mean()))


def _kl(reference: Tensor, logits: Tensor) -> Tensor:
    expected = reference.double().log_softmax(-1)
    return (expected.exp() * (expected - logits.double().log_softmax(-1))).sum(-1)
