"""Compute a layer's MLP without a gate."""

from __future__ import annotations

from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import activation_function
from paged_sdk.layers.xielu import Xielu
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["PlainMlp", "load_plain_mlp", "load_xielu"]


class PlainMlp:
    """Computes ``down(activation(up(x)))``."""

    def __init__(self, *, up: Linear, down: Linear, activation: Activation | Xielu) -> None:
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


def load_xielu(loader: WeightLoader, name: str) -> Xielu:
    """Load the numbers of one layer's activation; those that are not learned have defaults.

    :param name: prefix of the tensors' names
    :raises CheckpointError: a tensor is missing or no single number
    """
    return Xielu.of_learned(
        alpha_p=_number(loader, f"{name}.alpha_p"),
        alpha_n=_number(loader, f"{name}.alpha_n"),
        **{own: _number(loader, f"{name}.{own}") for own in ("beta", "eps") if f"{name}.{own}" in loader},
    )


def _number(loader: WeightLoader, name: str) -> float:
    # transformers keeps those that are learned as vectors of one element, and the others without a dimension.
    shape = () if loader.shape(name) == () else (1,)
    return float(loader.tensor(name, *shape, in_float32=True))


def load_plain_mlp(
    loader: WeightLoader,
    config: DecoderConfig,
    up: str,
    down: str,
    *,
    size: int,
    bias: bool,
    activation: Activation | Xielu,
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
        activation=activation,
    )
