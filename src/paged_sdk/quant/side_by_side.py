"""Concatenate the outputs of linear layers of different forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear

__all__ = ["SideBySideLinear"]


class SideBySideLinear(Linear):
    """Multiplies one input by several layers and concatenates their outputs: a topology may quantize q and not k.

    :param parts: at least one layer; all have equal ``in_features``
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__(
            in_features=parts[0].in_features,
            out_features=sum(part.out_features for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
        )
        self.parts: tuple[Linear, ...] = tuple(parts)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`."""
        return torch.cat([part.forward(x, ctx) for part in self.parts], dim=-1)

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`."""
        before = 0
        for part in self.parts:
            for rows in part.decoded(device):
                yield evolve(rows, first=before + rows.first)
            before += part.out_features
