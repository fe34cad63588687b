"""Multiply with weights in the model's dtype, by torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear

__all__ = ["DenseLinear"]


class DenseLinear(Linear):
    """Multiplies with a weight in the model's dtype.

    :param weight: ``[out_features, in_features]``
    :param bias: ``[out_features]``
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        rows, cols = weight.shape
        num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        super().__init__(in_features=cols, out_features=rows, num_bytes=num_bytes)
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`."""
        return F.linear(x, self.weight, self.bias)

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`."""
        none = torch.zeros(self.out_features, dtype=torch.float32, device=device)
        bias = none if self.bias is None else self.bias.float()
        yield DecodedRows(0, self.weight.float(), bias)
