"""Compute the vectors that a quantized cache subtracts from keys before storing them: means of rotated vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.placement import moved_to, working_on
from paged_sdk.kernels.rotary import Rotation, side_by_side_to_halves
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.quant.linear import Linear

__all__ = ["key_offsets", "span_offsets"]

# The rotations of a million positions at once would take a gigabyte.
_SPANS_AT_ONCE: Final = 256


def key_offsets(model: DecoderModel, max_model_len: int) -> tuple[Tensor, ...]:
    """Compute the offsets that the bias of each layer's keys gives, as :class:`~paged_sdk.attention.paged.PagedBackend`
    takes them.

    :param max_model_len: the largest number of positions of a sequence
    :returns: for each layer that keeps keys ``[num_spans, num_kv_heads, head_dim]`` float32, on the layer's device;
        empty if keys have no bias, or if a norm after it removes what all keys have in common
    """
    config, places = model.config, model.placement
    if not config.qkv_bias or config.qk_norm:
        return ()
    biases = []
    for index in config.kv_layers:
        layer, settings, shape = model.layers[index], config.ropes[index], config.layer(index)
        bias = torch.unflatten(_bias(layer.attention.qkv, model.dtype, places.layers[index]), 0, (-1, shape.head_dim))
        heads = bias[config.num_heads : config.num_heads + shape.num_kv_heads]
        if config.branch_scales is not None:
            heads = heads * config.branch_scales.key
        biases.append(side_by_side_to_halves(heads, settings.rotary_dim) if settings.interleaved else heads)
    return span_offsets(model, biases, max_model_len)


def span_offsets(model: DecoderModel, vectors: Sequence[Tensor], max_model_len: int) -> tuple[Tensor, ...]:
    """Compute what a vector in all keys of a layer, before they are rotated, is on average in each span of positions.

    :param vectors: for each layer that keeps keys ``[num_kv_heads, head_dim]`` float32, on the layer's device; elements
        that are rotated together are in different halves
    :returns: see :func:`key_offsets`
    """
    config, places = model.config, model.placement
    num_spans = -(-max_model_len // KEY_SPAN)
    means = {settings: _mean_rotation(rope, num_spans, model.device) for settings, rope in model.ropes.items()}
    rotations = {device: {settings: _on(mean, device) for settings, mean in means.items()} for device in places.devices}
    offsets = []
    for layer, vector in zip(config.kv_layers, vectors, strict=True):
        settings, device = config.ropes[layer], places.layers[layer]
        heads = vector.repeat(num_spans, 1, 1)
        rotations[device][settings].rotate_(heads)
        offsets.append(heads)
    return tuple(offsets)


def _bias(linear: Linear, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a layer's bias, ``[out_features]`` float32: its output for zeros, which every weight form computes."""
    with working_on(device):
        return linear.forward(torch.zeros(1, linear.in_features, dtype=dtype, device=device), None)[0].float()


def _on(rotation: Rotation, device: torch.device) -> Rotation:
    return Rotation(moved_to(rotation.cosines, device), moved_to(rotation.sines, device))


def _mean_rotation(rope: RotaryEmbedding, num_spans: int, device: torch.device) -> Rotation:
    """Return the mean cosines and sines of each span. Rotation is linear in both, so rotating a vector by the means
    gives the mean of its rotations.
    """
    parts = []
    for positions in torch.split(torch.arange(num_spans * KEY_SPAN, device=device), _SPANS_AT_ONCE * KEY_SPAN):
        rotation = rope.at(positions)
        parts.append([torch.unflatten(each, 0, (-1, KEY_SPAN)).mean(1) for each in (rotation.cosines, rotation.sines)])
    cosines, sines = (torch.cat(each) for each in zip(*parts, strict=True))
    return Rotation(cosines, sines)
