"""Compute how much of a recurrent state is left between the tokens of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decay_between"]


def decay_between(log_decay: Tensor) -> Tensor:
    """Return what is left at each token of what an earlier token of its chunk has written.

    Each pair of tokens has a sum of its own. Differences of sums since the chunk's start lose digits, as states decay
    by up to e^20 per token: the largest error of gated delta outputs was 7e-6 in float32, and is 2e-7.

    :param log_decay: ``[..., size]``, at most 0: the logarithm of what each token leaves of the state before it
    :returns: ``[..., size, size]``, of later tokens by earlier ones: 1 on the diagonal, 0 above it
    """
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    sums = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).tril(-1).cumsum(-2)
    return sums.masked_fill_(later, -torch.inf).exp_()
