"""Compute a layer's MLP without a gate."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import activation_function
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["PlainMlp", "load_plain_mlp"]


class PlainMlp:
    """Computes ``down(activation(up(x)))``."""

    def __init__(self, *, up: Linear, down: Linear, activation: Activation) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.up, self.down

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the MLP to ``[num_tokens, hidden_size]``, the tokens of a step."""
        return self.down.forward(activation_function(self.activation)(self.up.forward(x, ctx)), ctx)


def load_plain_mlp(
    loader: WeightLoader, config: DecoderConfig, up: str, down: str, *, size: int, bias: bool
) -> PlainMlp:
    """Load one MLP without a gate.

    :param up: name of the first matrix, without ``.weight``; ``down`` likewise of the last
    :param size: the MLP's intermediate size
    :param bias: whether the matrices have biases
    :raises CheckpointError: a tensor is missing or has another shape
    """
    return PlainMlp(
        up=loader.linear(
            [up],
            in_features=config.hidden_size,
            out_features=(size,),
            bias=bias,
            rows=(loader.shard.neurons(size),),
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
