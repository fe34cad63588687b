"""Multiply by a matrix whose columns are stored in another order, by reordering the input."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear

__all__ = ["ReorderedInputLinear"]


class ReorderedInputLinear(Linear):
    """Reorders groups of each row's elements, and applies a layer to the result.

    :param base: the layer, with its columns in the stored order
    :param order: int64 on the layer's device: for each group of stored columns, the group of the input that it
        multiplies
    :param width: elements of a group
    """

    def __init__(self, base: Linear, order: Tensor, width: int) -> None:
        super().__init__(in_features=base.in_features, out_features=base.out_features, num_bytes=base.num_bytes)
        self._base = base
        self._order = order
        self._width = width

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`."""
        groups = torch.unflatten(x, -1, (-1, self._width)).index_select(-2, self._order)
        return self._base.forward(groups.flatten(-2), ctx)

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`."""
        back = self._order.argsort()
        for rows in self._base.decoded(device):
            weight = torch.unflatten(rows.weight, -1, (-1, self._width))
            yield evolve(rows, weight=weight[:, back.to(weight.device)].flatten(-2))
