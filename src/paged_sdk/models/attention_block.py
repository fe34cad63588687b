"""Compute a layer's self-attention: the projections before and after attention over the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.family import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["AttentionBlock", "load_attention_block"]


class AttentionBlock:
    """Runs multi-head attention with grouped queries.

    :param qkv: projects to queries, keys and values of all heads, in this order
    :param qk_norm: norms each head of queries and keys, weight ``[num_heads + num_kv_heads, head_dim]``
    """

    def __init__(
        self, config: DecoderConfig, layer: int, *, qkv: Linear, output: Linear, qk_norm: RMSNorm | None
    ) -> None:
        self.qkv = qkv
        self.output = output
        self.qk_norm = qk_norm
        self._layer = layer
        self._head_dim = config.head_dim
        self._num_qk_heads = config.num_heads + config.num_kv_heads

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Project to queries, keys and values, attend over the cache, and project the result back.

        :param x: ``[num_tokens, hidden_size]``
        :param rotation: the rotary embedding's cosines and sines at the tokens' positions
        """
        heads = torch.unflatten(self.qkv.forward(x, ctx), -1, (-1, self._head_dim))
        query_key, value = heads[:, : self._num_qk_heads], heads[:, self._num_qk_heads :]
        if self.qk_norm is not None:
            query_key = self.qk_norm.forward(query_key)
        attended = ctx.attention.rotate_and_forward(self._layer, query_key, value, rotation)
        return self.output.forward(attended.flatten(1), ctx)


def load_attention_block(
    loader: WeightLoader, config: DecoderConfig, names: TensorNames, prefix: str, layer: int
) -> AttentionBlock:
    """Load one layer's attention.

    :param prefix: what the names of the layer's tensors start with
    :raises CheckpointError: a tensor is missing or has another shape
    """
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return AttentionBlock(
        config,
        layer,
        qkv=loader.linear(
            [prefix + name for name in names.qkv],
            in_features=config.hidden_size,
            out_features=(query_size, kv_size, kv_size),
            bias=config.qkv_bias,
        ),
        output=loader.linear(
            [f"{prefix}self_attn.o_proj"],
            in_features=query_size,
            out_features=(config.hidden_size,),
            bias=config.output_bias,
        ),
        qk_norm=_load_qk_norm(loader, config, prefix) if config.qk_norm else None,
    )


def _load_qk_norm(loader: WeightLoader, config: DecoderConfig, prefix: str) -> RMSNorm:
    """Load the norms of queries and keys as one norm, whose weight has a row for each head."""
    query = loader.tensor(f"{prefix}self_attn.q_norm.weight", config.head_dim)
    key = loader.tensor(f"{prefix}self_attn.k_norm.weight", config.head_dim)
    weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return RMSNorm(weight, config.norm_eps, offset=config.norm_offset)
