"""Compute what each layer adds of a token besides its embedding (per-layer embeddings, of Gemma 3n and 4)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.layer_shape import LayerInputConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import activation_function
from paged_sdk.layers.norm import Norm
from paged_sdk.models.norms import load_norm
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear

__all__ = ["LayerInputBlock", "LayerInputs", "load_layer_input_block", "load_layer_inputs"]

_MEAN_SCALE: Final = 2.0**-0.5  # of the sum of two independent vectors


class LayerInputs:
    """Computes the vectors of a step's tokens for all layers: rows of a table, and projections of embeddings.

    :param table: a row per token, with the vectors of all layers; scaled by the root of a vector's size
    :param projection: projects embeddings to the vectors of all layers
    :param norm: norms each projected vector
    """

    def __init__(
        self, config: DecoderConfig, own: LayerInputConfig, *, table: Embedding, projection: Linear, norm: Norm
    ) -> None:
        self.table = table
        self.projection = projection
        self._norm = norm
        self._scale = config.hidden_size**-0.5
        self._shape = (config.num_layers, own.size)
        self._image_token = own.image_token

    def forward(self, token_ids: Tensor, embedded: Tensor, ctx: StepContext) -> Tensor:
        """Compute the vectors, ``[num_tokens, num_layers, size]``.

        :param token_ids: ``[num_tokens]`` int64
        :param embedded: the input of the first layer, ``[num_tokens, hidden_size]``
        """
        if ctx.inserted is not None:
            token_ids = token_ids.index_fill(0, ctx.inserted.places, self._image_token)
        looked_up = torch.unflatten(self.table.forward(token_ids), -1, self._shape)
        projected = torch.unflatten(self.projection.forward(embedded, ctx) * self._scale, -1, self._shape)
        return self._norm.forward(projected).add_(looked_up).mul_(_MEAN_SCALE)


def load_layer_inputs(loader: WeightLoader, config: DecoderConfig, names: TensorNames) -> LayerInputs | None:
    """Load a model's second table of embeddings, and the projection beside it; None if the model has none.

    :raises CheckpointError: a tensor is missing or has another shape
    """
    own = config.layer_inputs
    if own is None:
        return None
    table, projection, norm = (names.body + name for name in names.layer_inputs)
    width = config.num_layers * own.size
    return LayerInputs(
        config,
        own,
        table=loader.embedding(f"{table}.weight", vocab_size=own.vocab_size, hidden_size=width, scale=own.size**0.5),
        projection=loader.linear([projection], in_features=config.hidden_size, out_features=(width,)),
        norm=load_norm(loader, config, norm, own.size),
    )


class LayerInputBlock:
    """Computes what a layer adds to the residual stream of its tokens' vectors: ``norm(output(activation(gate(x)) *
    vector))``.

    :param layer: the layer's index
    """

    def __init__(self, config: DecoderConfig, layer: int, *, gate: Linear, output: Linear, norm: Norm) -> None:
        self.gate = gate
        self.output = output
        self.norm = norm
        self._layer = layer
        self._activation = activation_function(config.activation)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.gate, self.output

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """Apply the block to the residual stream, ``[num_tokens, hidden_size]``."""
        assert ctx.layer_inputs is not None
        gated = self._activation(self.gate.forward(x, ctx)) * ctx.layer_inputs[:, self._layer]
        return self.norm.forward(self.output.forward(gated, ctx))


def load_layer_input_block(
    loader: WeightLoader, config: DecoderConfig, prefix: str, layer: int
) -> LayerInputBlock | None:
    """Load one layer's block; None if the model has none.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own = config.layer_inputs
    if own is None:
        return None
    hidden = config.hidden_size
    return LayerInputBlock(
        config,
        layer,
        gate=loader.linear([f"{prefix}per_layer_input_gate"], in_features=hidden, out_features=(own.size,)),
        output=loader.linear([f"{prefix}per_layer_projection"], in_features=own.size, out_features=(hidden,)),
        norm=load_norm(loader, config, f"{prefix}post_per_layer_input_norm"),
    )
