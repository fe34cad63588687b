"""Weights as they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import Linear

__all__ = ["DenseLinear"]


class DenseLinear(Linear):
    """A weight in the model's dtype.

    :param weight: ``[out_features, in_features]``
    :param bias: ``[out_features]``
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """See :meth:`Linear.forward`."""
        return F.linear(x, self.weight, self.bias)
