"""Build a model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paged_sdk.layers.norm import RMSNorm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import load_decoder_layer
from paged_sdk.models.family import DecoderFamily, TensorNames, find_family
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["load_model"]


def load_model(
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    policy: WeightPolicy = DENSE,
    on_progress: Callable[[int, int], None] | None = None,
) -> DecoderModel:
    """Build a model; the weights are loaded once, in their final place.

    :param config: ``config.json``'s content
    :param source: the weights; it stays open, and tensors that the model does not use are not read
    :param dtype: of weights, activations, keys and values
    :param policy: chooses the form that each matrix takes; by default matrices are decoded
    :param on_progress: called with the number of tensors loaded and of all tensors
    :raises UnsupportedArchitectureError: no family has this ``model_type``
    :raises CheckpointError: the config cannot be used, or a tensor is missing or has another shape than it says
    """
    family = find_family(config)
    shape = family.read(ConfigFields(config))
    names = _names_in(source, family)
    loader = WeightLoader(
        source, policy, dtype=dtype, device=device, prefixes=(names.body, names.head), on_progress=on_progress
    )
    embedding = loader.embedding(
        f"{names.body}embed_tokens.weight",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        scale=shape.embedding_scale,
    )
    model = DecoderModel(
        shape,
        embedding=embedding,
        layers=[load_decoder_layer(loader, shape, names, layer) for layer in range(shape.num_layers)],
        norm=RMSNorm(
            loader.tensor(f"{names.body}norm.weight", shape.hidden_size), shape.norm_eps, offset=shape.norm_offset
        ),
        head=loader.tied_head(names.head, embedding)
        if shape.tie_embeddings
        else loader.linear([names.head], in_features=shape.hidden_size, out_features=(shape.vocab_size,), is_head=True),
        ropes={settings: RotaryEmbedding(settings, device=device) for settings in dict.fromkeys(shape.ropes)},
        dtype=dtype,
        device=device,
    )
    loader.close()
    return model


def _names_in(source: WeightSource, family: DecoderFamily) -> TensorNames:
    """Return the family's names that the checkpoint uses; if none fit, the usual ones, which the error will mention."""
    return next((names for names in family.names if f"{names.body}embed_tokens.weight" in source), family.names[0])
