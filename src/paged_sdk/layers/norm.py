"""Compute root mean square normalization (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.norm import add_rms_norm, rms_norm

__all__ = ["RMSNorm"]


class RMSNorm:
    """Computes ``x / rms(x) * weight`` over the last dimension, with the mean in float32 at least.

    Models differ in where they round, and each is followed: llama and its kin round to the model's dtype before the
    multiplication by the weight; gemma, whose weights are stored less 1, after it.

    :param weight: ``[..., hidden_size]``, broadcast against the input
    :param offset: is added to the weight; unless it is 0, the multiplication is in float32 at least
    :ivar weight: the weight with the offset added
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._rounds_last = offset != 0.0
        self.weight: Tensor = weight.to(wide) + offset if self._rounds_last else weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize into a new tensor of the dtype of ``x``.

        :param x: ``[..., hidden_size]`` of the model's dtype
        """
        if x.is_cuda:
            return rms_norm(x, self.weight, self.eps)
        wide = x.to(self.weight.dtype) if self._rounds_last else x
        return F.rms_norm(wide, x.shape[-1:], None, self.eps).mul_(self.weight).to(x.dtype)

    def add_and_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the residual stream, and normalize the sum: on CUDA in one launch.

        :param x: ``[..., hidden_size]`` of the model's dtype
        :param residual: like ``x``; its memory may be used for the sum
        :returns: the normalized sum, and the sum
        """
        if x.is_cuda:
            return add_rms_norm(x, residual, self.weight, self.eps)
        residual += x
        return self.forward(residual), residual
