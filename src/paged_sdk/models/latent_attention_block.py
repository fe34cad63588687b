"""Compute a layer's multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.rotary import Rotation, side_by_side_to_halves
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["LatentAttentionBlock", "load_latent_attention_block"]


class LatentAttentionBlock:
    """Runs latent attention: the KV cache holds latent vectors, of which keys and values of the heads are projections.

    There is one key per token for all heads, the rotated elements and then the latent vector. How a step attends over
    them is its own choice (:meth:`~paged_sdk.kernels.step.AttentionStep.attend_over_latents`).

    :param query: projects the hidden state to queries of all heads, or to the vector that they are projected from
    :param query_norm: norms that vector, which ``query_up`` projects to queries; both None: there is none
    :param latent: projects to the latent vector, and to the elements of the key that are rotated
    :param latent_norm: norms the latent vector
    :param heads: projects between latent vectors and heads
    """

    def __init__(
        self,
        config: DecoderConfig,
        shape: LatentAttentionConfig,
        layer: int,
        *,
        query: Linear,
        query_norm: RMSNorm | None,
        query_up: Linear | None,
        latent: Linear,
        latent_norm: RMSNorm,
        heads: LatentHeads,
        output: Linear,
    ) -> None:
        self.query = query
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent = latent
        self.latent_norm = latent_norm
        self.heads = heads
        self.output = output
        self._shape = shape
        self._layer = layer
        self._rope = config.ropes[layer]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        up = () if self.query_up is None else (self.query_up,)
        return self.query, *up, self.latent, self.output

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Project to queries and to the latent vector, attend over the KV cache, and project the result back.

        :param x: ``[num_tokens, hidden_size]``
        :param rotation: the rotary embedding's cosines and sines at the tokens' positions
        """
        shape = self._shape
        queries = torch.unflatten(self._queries(x, ctx), -1, (-1, shape.query_dim))
        if rotation.query_scale is not None:
            queries *= rotation.query_scale[:, None, None]
        unrotated, rotated = queries[..., : shape.nope_dim], queries[..., shape.nope_dim :]
        latent = self.latent.forward(x, ctx)
        key = x.new_empty(len(x), shape.key_dim)
        key[:, : shape.rope_dim] = self._halves(latent[:, shape.rank :])
        key[:, shape.rope_dim :] = self.latent_norm.forward(latent[:, : shape.rank])
        attended = ctx.attention.attend_over_latents(
            self._layer, self._halves(rotated), unrotated, key, self.heads, rotation
        )
        return self.output.forward(attended.flatten(1), ctx)

    def _queries(self, x: Tensor, ctx: StepContext) -> Tensor:
        queries = self.query.forward(x, ctx)
        if self.query_norm is None or self.query_up is None:
            return queries
        return self.query_up.forward(self.query_norm.forward(queries), ctx)

    def _halves(self, rotated: Tensor) -> Tensor:
        """Return elements that are rotated in the order of the kernels, in which pairs are half a vector apart."""
        return side_by_side_to_halves(rotated, self._shape.rope_dim) if self._rope.interleaved else rotated


def load_latent_attention_block(
    loader: WeightLoader, config: DecoderConfig, shape: LatentAttentionConfig, prefix: str, layer: int
) -> LatentAttentionBlock:
    """Load one layer's latent attention. Of a divided model, each rank has some of the heads, and all latent vectors.

    :param prefix: prefix of the layer's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    name, shard = f"{prefix}self_attn.", loader.shard
    query_size = config.num_heads * shape.query_dim
    own_queries = (shard.of_heads(shape.query_dim),)
    if shape.query_rank is None:
        query_norm, query_up = None, None
        query = loader.linear(
            [f"{name}q_proj"], in_features=config.hidden_size, out_features=(query_size,), rows=own_queries
        )
    else:
        query = loader.linear(
            [f"{name}q_a_proj"],
            in_features=config.hidden_size,
            out_features=(shape.query_rank,),
            bias=config.qkv_bias,
        )
        query_norm = RMSNorm(loader.tensor(f"{name}q_a_layernorm.weight", shape.query_rank), shape.norm_eps)
        query_up = loader.linear(
            [f"{name}q_b_proj"], in_features=shape.query_rank, out_features=(query_size,), rows=own_queries
        )
    return LatentAttentionBlock(
        config,
        shape,
        layer,
        query=query,
        query_norm=query_norm,
        query_up=query_up,
        latent=loader.linear(
            [f"{name}kv_a_proj_with_mqa"],
            in_features=config.hidden_size,
            out_features=(shape.rank + shape.rope_dim,),
            bias=config.qkv_bias,
        ),
        latent_norm=RMSNorm(loader.tensor(f"{name}kv_a_layernorm.weight", shape.rank), shape.norm_eps),
        heads=loader.latent_heads(f"{name}kv_b_proj.weight", config.num_heads, shape),
        output=loader.linear(
            [f"{name}o_proj"],
            in_features=config.num_heads * shape.value_dim,
            out_features=(config.hidden_size,),
            bias=config.output_bias,
            cols=lambda each: each.of_heads(shape.value_dim),
        ),
    )
