"""Compute attention and a recurrent layer side by side (Falcon-H1)."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.attention_block import AttentionBlock
from paged_sdk.models.gated_delta_block import GatedDeltaBlock
from paged_sdk.models.mamba2_block import Mamba2Block
from paged_sdk.models.short_conv_block import ShortConvBlock
from paged_sdk.quant.linear import Linear

__all__ = ["BesideBlock", "RecurrentBlock"]

RecurrentBlock: TypeAlias = ShortConvBlock | GatedDeltaBlock | Mamba2Block


class BesideBlock:
    """Adds the outputs of attention and of a recurrent layer, which have the same input."""

    def __init__(self, attention: AttentionBlock, recurrent: RecurrentBlock) -> None:
        self.attention = attention
        self.recurrent = recurrent

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return (*self.attention.linears, *self.recurrent.linears)

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Apply both to the tokens of a step, ``[num_tokens, hidden_size]``."""
        return self.attention.forward(x, rotation, ctx) + self.recurrent.forward(x, rotation, ctx)
