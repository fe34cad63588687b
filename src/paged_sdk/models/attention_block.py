"""Compute a layer's self-attention: the projections, and attention over the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import AttentionGate, DecoderConfig
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.rotary import Rotation, side_by_side_to_halves
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import Norm
from paged_sdk.models.norms import SharedWholeNorms, WholeNorms, load_qk_norm, load_value_norm
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.shard import WHOLE, Shard
from paged_sdk.quant.linear import Linear

__all__ = ["AttentionBlock", "load_attention_block"]


class AttentionBlock:
    """Runs grouped-query attention.

    :param qkv: projects to queries, keys and values of all heads, in this order; without values if keys are values, and
        to queries only in a layer that attends over another layer's keys; then to gates, if these are apart
    :param qk_norm: norms queries and keys, ``[num_tokens, num_heads + num_kv_heads, head_dim]``; None: no norm
    :param value_norm: norms values; None: no norm
    :param sinks: an additional attention logit per head that has no value, ``[num_heads]`` float32; None: no sinks
    :param shard: which of the config's heads are computed here
    :ivar shape: the layer's sizes, of the heads that are computed here
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: Norm | WholeNorms | SharedWholeNorms | None,
        value_norm: Norm | None = None,
        sinks: Tensor | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.qkv = qkv
        self.output = output
        self.qk_norm = qk_norm
        self.sinks = sinks
        self._learned = None if sinks is None else LearnedScores(sinks=sinks)
        self._layer = layer
        own = shard.local(config)
        shape = own.layer(layer)
        assert value_norm is not None or not shape.keys_as_values, "keys are rotated in place"
        self.value_norm = value_norm
        self.shape = shape
        self._num_heads = own.num_heads
        self._num_qk_heads = own.num_heads + shape.num_kv_heads
        self._rope = config.ropes[layer]
        self._clip = config.qkv_clip
        self._norms_last = config.qk_norm_after_rope
        self._gate = config.attention_gate
        self._scales = config.branch_scales

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.qkv, self.output

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Project to queries, keys and values, attend over the KV cache, and project the result back.

        :param x: ``[num_tokens, hidden_size]``
        :param rotation: the rotary embedding's cosines and sines at the tokens' positions
        """
        scales = self._scales
        if scales is not None and scales.attention_input != 1.0:
            x = x * scales.attention_input
        heads = torch.unflatten(self.qkv.forward(x, ctx), -1, (-1, self.shape.head_dim))
        gates, heads = self._without_gates(heads)
        if scales is not None and scales.key != 1.0:
            heads[:, self._num_heads : self._num_qk_heads] *= scales.key
        query_key, value = heads[:, : self._num_qk_heads], heads[:, self._num_qk_heads :]
        if self.shape.keys_as_values:
            value = query_key[:, self._num_heads :]
        if self.qk_norm is not None and not self._norms_last:
            query_key = self.qk_norm.forward(query_key)
        if self.value_norm is not None:
            value = self.value_norm.forward(value)
        if self._clip is not None:
            query_key, value = (each.clamp(-self._clip, self._clip) for each in (query_key, value))
        if self._rope.interleaved:
            query_key = side_by_side_to_halves(query_key, self._rope.rotary_dim)
        if rotation.query_scale is not None:
            query_key[:, : self._num_heads] *= rotation.query_scale[:, None, None]
        attended = self._attend(query_key, value, rotation, ctx)
        if gates is not None:
            attended = attended * gates.sigmoid()
        output = self.output.forward(attended.flatten(1), ctx)
        return output if scales is None else output * scales.attention_output

    def _attend(self, query_key: Tensor, value: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Rotate queries and keys, and attend over the KV cache.

        :param query_key: ``[num_tokens, num_heads + num_kv_heads, head_dim]``, changed in place; queries alone in a
            layer that attends over the keys of another
        """
        if not self.shape.keeps_kv:
            rotation.rotate_(query_key)
            return ctx.attention.attend(self._layer, query_key, self._learned)
        if self.qk_norm is None or not self._norms_last:
            return ctx.attention.rotate_and_forward(self._layer, query_key, value, rotation, self._learned)
        rotation.rotate_(query_key)
        normed = self.qk_norm.forward(query_key)
        query, key = normed[:, : self._num_heads], normed[:, self._num_heads :]
        return ctx.attention.forward(self._layer, query, key, value, self._learned)

    def _without_gates(self, heads: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gates, ``[num_tokens, num_heads, head_dim]``, and queries, keys and values; None: no gates."""
        match self._gate:
            case None:
                return None, heads
            case AttentionGate.APART:
                return heads[:, -self._num_heads :], heads[:, : -self._num_heads]
            case AttentionGate.WITH_QUERIES:
                pairs, others = heads[:, : 2 * self._num_heads], heads[:, 2 * self._num_heads :]
                return pairs[:, 1::2], torch.cat([pairs[:, 0::2], others], 1)


def load_attention_block(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str, layer: int
) -> AttentionBlock:
    """Load one layer's attention.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    shape, shard = config.layer(layer), loader.shard
    head_dim, num_kv = shape.head_dim, shape.num_kv_projections
    query_size, kv_size = config.num_heads * head_dim, shape.num_kv_heads * head_dim
    num_per_head = 2 if config.attention_gate is AttentionGate.WITH_QUERIES else 1
    own, own_kv = shard.of_heads(num_per_head * head_dim), shard.of_kv_heads(head_dim)
    gates = [prefix + names.attention_gate] if config.attention_gate is AttentionGate.APART else []
    sinks = loader.tensor(f"{prefix}self_attn.sinks", config.num_heads).float() if config.attention_sinks else None
    return AttentionBlock(
        config,
        layer,
        qkv=loader.linear(
            [*(prefix + name for name in names.qkv[: 1 + num_kv]), *gates],
            in_features=config.hidden_size,
            out_features=(num_per_head * query_size, *[kv_size] * num_kv, *[query_size] * len(gates)),
            bias=config.qkv_bias,
            without_bias=gates,
            order=_order(config),
            rows=(own, *[own_kv] * num_kv, *[own] * len(gates)),
        ),
        output=loader.linear(
            [prefix + names.output],
            in_features=query_size,
            out_features=(config.hidden_size,),
            bias=config.output_bias,
            cols=lambda each: each.of_heads(head_dim),
        ),
        qk_norm=load_qk_norm(loader, config, names, prefix, layer),
        value_norm=load_value_norm(loader, config, head_dim) if config.value_norm and num_kv else None,
        sinks=None if sinks is None else sinks[shard.of_heads(1)].contiguous(),
        shard=shard,
    )


def _order(config: DecoderConfig) -> Tensor | None:
    """Return the permutation of a fused QKV tensor's rows that puts all queries first, then all keys, then all values;
    None if they are in this order.
    """
    if config.qkv_groups == 1 and not config.qkv_values_first:
        return None
    heads = config.num_heads // config.qkv_groups
    kv_heads = config.num_kv_heads // config.qkv_groups
    rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    parts = torch.split(rows.view(config.qkv_groups, -1, config.head_dim), [heads, kv_heads, kv_heads], 1)
    query, *key_value = (part.flatten() for part in parts)
    return torch.cat([query, *(reversed(key_value) if config.qkv_values_first else key_value)])
