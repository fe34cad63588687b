"""Compute a decoder's norms: RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467), LayerNorm (Ba et al., 2016, arXiv
1607.06450), or none.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.norm import add_rms_norm, rms_norm

__all__ = ["LayerNorm", "NoNorm", "Norm", "RMSNorm"]


class RMSNorm:
    """Computes ``x / rms(x) * weight`` over the last dimension, with the mean in at least float32.

    Rounding to the model's dtype happens where the model family does it: in llama-like models before the multiplication
    by the weight; in gemma, which stores ``weight - 1``, and in olmo2 and helium after it.

    :param weight: ``[..., hidden_size]``, broadcast against the input
    :param offset: added to the weight; if nonzero, the multiplication is in at least float32
    :param rounds_last: do the multiplication in at least float32 even if ``offset`` is 0
    :ivar weight: the weight with the offset added
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_last: bool = False) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._rounds_last = rounds_last or offset != 0.0
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

    def scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normalize by a given mean square, for tensor-parallel ranks that hold only some of the columns.

        :param x: ``[num_rows, hidden_size]`` of the model's dtype, or a rank's columns of it
        :param mean_square: ``[num_rows]``, over all columns, in at least float32
        """
        normed = x.to(mean_square.dtype) * (mean_square + self.eps).rsqrt()[:, None]
        rounded = normed.to(self.weight.dtype if self._rounds_last else x.dtype)
        return (rounded * self.weight).to(x.dtype)

    def add_and_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream and normalize the sum, on CUDA in one launch.

        :param x: ``[..., hidden_size]`` of the model's dtype
        :param residual: like ``x``; its memory may be used for the sum
        :returns: the normalized sum, and the sum
        """
        if x.is_cuda:
            return add_rms_norm(x, residual, self.weight, self.eps)
        residual += x
        return self.forward(residual), residual


class LayerNorm:
    """Computes ``(x - mean(x)) / std(x) * weight + bias`` over the last dimension, in at least float32, and rounds
    once.

    :param weight: ``[..., hidden_size]``, broadcast against the input
    :param bias: likewise; None: no bias
    :param offset: added to the weight
    :ivar weight: the weight with the offset added
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, offset: float = 0.0) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weight: Tensor = weight.to(wide) + offset
        self.bias: Tensor | None = None if bias is None else bias.to(wide)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize into a new tensor; see :meth:`RMSNorm.forward`."""
        normed = F.layer_norm(x.to(self.weight.dtype), x.shape[-1:], eps=self.eps).mul_(self.weight)
        return (normed if self.bias is None else normed.add_(self.bias)).to(x.dtype)

    def add_and_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream and normalize the sum; see :meth:`RMSNorm.add_and_forward`."""
        residual += x
        return self.forward(residual), residual


class NoNorm:
    """Takes the place of a norm in models that have none there."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` itself."""
        return x

    def add_and_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream, and return the sum twice."""
        residual += x
        return residual, residual


Norm: TypeAlias = RMSNorm | LayerNorm | NoNorm
