"""Compute a gated short convolution, which some layers have instead of attention (LFM2)."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import ShortConvConfig
from paged_sdk.kernels.native.recurrent import NativeShortConv
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.short_conv import short_conv
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["ShortConvBlock", "load_short_conv_block"]


class ShortConvBlock:
    """Computes ``out(c * conv(b * x))`` of projections b, c and x of the input.

    :param layer: the layer's index, under which the step has its states
    :param input: projects to b, c and x, in this order
    :param weight: of the convolution, ``[hidden_size, kernel_size]``
    :param bias: of the convolution, ``[hidden_size]``; None: it has none
    :ivar native: the native kernel for the CPU; None: it does not have this dtype and these sizes
    """

    def __init__(self, layer: int, *, input: Linear, output: Linear, weight: Tensor, bias: Tensor | None) -> None:
        self.input = input
        self.output = output
        self._layer = layer
        self._weight = weight
        self._bias = bias
        serves = weight.device.type == "cpu" and NativeShortConv.serves(weight)
        self.native: NativeShortConv | None = NativeShortConv(weight, bias, silu=False) if serves else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.input, self.output

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Apply the block to the tokens of a step, ``[num_tokens, hidden_size]``. Positions do not matter."""
        b, c, inner = self.input.forward(x, ctx).chunk(3, -1)
        step = ctx.attention.recurrent
        (pool,) = step.states[self._layer]
        if self.native is not None and step.rows.native is not None:
            mixed = self.native.forward(inner, pool, step.rows.native, (b, c))
        else:
            mixed = c * short_conv(b * inner, self._weight, self._bias, pool, step.rows)
        return self.output.forward(mixed, ctx)


def load_short_conv_block(
    loader: WeightLoader, config: DecoderConfig, conv: ShortConvConfig, prefix: str, layer: int
) -> ShortConvBlock:
    """Load one layer's convolution.

    :param prefix: prefix of the block's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    hidden, channels = config.hidden_size, conv.channels
    return ShortConvBlock(
        layer,
        input=loader.linear([f"{prefix}in_proj"], in_features=hidden, out_features=(channels,) * 3, bias=conv.bias),
        output=loader.linear([f"{prefix}out_proj"], in_features=channels, out_features=(hidden,), bias=conv.bias),
        weight=loader.tensor(f"{prefix}conv.weight", channels, 1, conv.kernel_size).squeeze(1),
        bias=loader.tensor(f"{prefix}conv.bias", channels) if conv.bias else None,
    )
