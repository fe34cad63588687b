"""Compute a layer's multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.rotary import Rotation, side_by_side_to_halves
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["LatentAttentionBlock", "load_latent_attention_block"]


class LatentAttentionBlock:
    """Runs latent attention over the latent vectors themselves: keys and values of the heads are never computed.

    A head's key is a projection of a token's latent vector, so its product with a query is that of the latent vector
    with the query after the transposed projection. Outputs are projected likewise: a weighted sum of values is the
    projection of the weighted sum of latent vectors. So there is one key per token for all heads, the rotated elements
    and then the latent vector, and it is the value, too; what attention returns of its rotated elements is not used.

    :param query: projects the hidden state to queries of all heads, or to the vector that they are projected from
    :param query_norm: norms that vector, which ``query_up`` projects to queries; both None: there is none
    :param latent: projects to the latent vector, and to the elements of the key that are rotated
    :param latent_norm: norms the latent vector
    :param key_up: the projections of keys, ``[num_heads, nope_dim, rank]``
    :param value_up: the transposed projections of values, ``[num_heads, rank, value_dim]``
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
        key_up: Tensor,
        value_up: Tensor,
        output: Linear,
    ) -> None:
        self.query = query
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent = latent
        self.latent_norm = latent_norm
        self.key_up = key_up
        self.value_up = value_up
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
        unrotated, rotated = queries[..., : shape.nope_dim], queries[..., shape.nope_dim :]
        latent = self.latent.forward(x, ctx)
        query_key = x.new_empty(len(x), queries.shape[1] + 1, shape.key_dim)
        query_key[:, :-1, : shape.rope_dim] = self._halves(rotated)
        query_key[:, :-1, shape.rope_dim :] = _of_each_head(unrotated, self.key_up)
        query_key[:, -1, : shape.rope_dim] = self._halves(latent[:, shape.rank :])
        query_key[:, -1, shape.rope_dim :] = self.latent_norm.forward(latent[:, : shape.rank])
        attended = ctx.attention.rotate_and_forward(self._layer, query_key, query_key[:, -1:], rotation)
        return self.output.forward(_of_each_head(attended[..., shape.rope_dim :], self.value_up).flatten(1), ctx)

    def _queries(self, x: Tensor, ctx: StepContext) -> Tensor:
        queries = self.query.forward(x, ctx)
        if self.query_norm is None or self.query_up is None:
            return queries
        return self.query_up.forward(self.query_norm.forward(queries), ctx)

    def _halves(self, rotated: Tensor) -> Tensor:
        """Return elements that are rotated in the order of the kernels, in which pairs are half a vector apart."""
        return side_by_side_to_halves(rotated, self._shape.rope_dim) if self._rope.interleaved else rotated


def _of_each_head(heads: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head with its own matrix.

    :param heads: ``[num_tokens, num_heads, n]``
    :param matrices: ``[num_heads, n, m]``
    :returns: ``[num_tokens, num_heads, m]``
    """
    return torch.bmm(heads.transpose(0, 1), matrices).transpose(0, 1)


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
    height = shape.nope_dim + shape.value_dim
    up = loader.decoded(
        f"{name}kv_b_proj.weight", config.num_heads * height, shape.rank, what="Projections of latent vectors"
    )[shard.of_heads(height)]
    key_up, value_up = torch.split(torch.unflatten(up, 0, (-1, height)), [shape.nope_dim, shape.value_dim], 1)
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
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        output=loader.linear(
            [f"{name}o_proj"],
            in_features=config.num_heads * shape.value_dim,
            out_features=(config.hidden_size,),
            bias=config.output_bias,
            cols=lambda each: each.of_heads(shape.value_dim),
        ),
    )
