"""Compute a layer's MLP without a gate."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import activation_function
from paged_sdk.models.family import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["PlainMlp", "load_plain_mlp"]


class PlainMlp:
    """Computes ``down(activation(up(x)))``."""

    def __init__(self, *, up: Linear, down: Linear, activation: Activation) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the MLP to ``[num_tokens, hidden_size]``, the tokens of a step."""
        return self.down.forward(activation_function(self.activation)(self.up.forward(x, ctx)), ctx)


def load_plain_mlp(loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str) -> PlainMlp:
    """Load one layer's MLP.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    size = config.intermediate_size
    return PlainMlp(
        up=loader.linear(
            [prefix + names.up],
            in_features=config.hidden_size,
            out_features=(size,),
            bias=config.mlp_bias,
            rows=(loader.shard.neurons(size),),
        ),
        down=loader.linear(
            [prefix + names.down],
            in_features=size,
            out_features=(config.hidden_size,),
            bias=config.mlp_bias,
            cols=lambda shard: shard.neurons(size),
        ),
        activation=config.activation,
    )
