"""Compute a layer's gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from torch import Tensor

from paged_sdk.config.decoder import Activation, DecoderConfig
from paged_sdk.kernels.activation import GatedActivation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import activation_function
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["GatedMlp", "load_gated_mlp"]

# Activations with a kernel; others are computed one operation at a time.
_KERNELS: Final[Mapping[Activation, GatedActivation]] = MappingProxyType(
    {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh"}
)


class GatedMlp:
    """Computes ``down(activation(gate(x)) * up(x))``.

    :param gate_up: gate and up as one layer, with outputs in this order
    """

    def __init__(self, *, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._kernel = _KERNELS.get(activation)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the MLP to ``[num_tokens, hidden_size]``, the tokens of a step."""
        if self._kernel is not None:
            return self.down.forward(self.gate_up.forward_gated(x, self._kernel, ctx), ctx)
        gate, up = self.gate_up.forward(x, ctx).chunk(2, dim=-1)
        return self.down.forward(activation_function(self.activation)(gate) * up, ctx)


def load_gated_mlp(
    loader: WeightLoader, config: DecoderConfig, gate_up: Sequence[str], down: str, *, size: int, bias: bool
) -> GatedMlp:
    """Load one gated MLP.

    :param gate_up: names of the gate's and the up projection's matrices, or of one that holds both
    :param down: name of the down projection's matrix
    :param size: intermediate size
    :param bias: whether the projections have biases
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own = loader.shard.neurons(size)
    return GatedMlp(
        gate_up=loader.linear(
            gate_up,
            in_features=config.hidden_size,
            out_features=(size, size),
            bias=bias,
            rows=(own, own),
        ),
        down=loader.linear(
            [down],
            in_features=size,
            out_features=(config.hidden_size,),
            bias=bias,
            cols=lambda shard: shard.neurons(size),
        ),
        activation=config.activation,
    )
