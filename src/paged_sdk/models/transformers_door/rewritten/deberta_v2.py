"""Rewrites the modules of DeBERTa's second and third version (He et al., 2021, arXiv 2111.09543)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    ConvLayer,
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from paged_sdk.kernels.relative_bias import RelativeBias
from paged_sdk.models.transformers_door.seam import POSITION_BIAS, Mask, attention
from paged_sdk.models.transformers_door.skeleton import refusal

__all__ = ["REWRITTEN"]


class _SelfAttention(DisentangledSelfAttention):
    """Calls the attention interface, with numbers for each query and key."""

    _of_positions: tuple[Tensor | None, Tensor | None] | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend within ``[1, num_tokens, hidden_size]``.

        :param relative_pos: the buckets of distances; None: the config has no numbers for them
        :param rel_embeddings: ``[num_buckets, hidden_size]``
        """
        heads = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            each(hidden_states).view(heads) for each in (self.query_proj, self.key_proj, self.value_proj)
        )
        num_terms = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        scale, bias = (self.attention_head_size * num_terms) ** -0.5, None
        if relative_pos is not None and rel_embeddings is not None and num_terms > 1:
            keys, queries = self._positions(rel_embeddings)
            bias = RelativeBias(
                relative_pos,
                of_queries=None if keys is None else _products(query, keys) * scale,
                of_keys=None if queries is None else _products(key, queries) * scale,
            )
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        options = {"scaling": scale, POSITION_BIAS: bias}
        # Each token sees the whole text.
        attended = attention(self, query, key, value, Mask(is_bidirectional=True), **options)
        return attended.flatten(2), None

    def _positions(self, rel_embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the keys and queries of distances, ``[num_heads, num_buckets, head_dim]`` each; None: not used. They
        depend on weights alone, and are computed once: over short texts they take longer than the layer.
        """
        if self._of_positions is None or rel_embeddings.is_meta:
            shared = self.share_att_key
            of_keys = (self.key_proj if shared else self.pos_key_proj) if "c2p" in self.pos_att_type else None
            of_queries = (self.query_proj if shared else self.pos_query_proj) if "p2c" in self.pos_att_type else None
            heads = (len(rel_embeddings), -1, self.attention_head_size)
            keys, queries = (
                None if each is None else each(rel_embeddings).view(heads).transpose(0, 1).contiguous()
                for each in (of_keys, of_queries)
            )
            self._of_positions = keys, queries
        return self._of_positions


def _products(rows: Tensor, positions: Tensor) -> Tensor:
    """Return ``[num_tokens, num_heads, num_buckets]`` of rows ``[1, num_tokens, num_heads, head_dim]``."""
    return (rows[0].transpose(0, 1) @ positions.mT).transpose(0, 1)


class _Encoder(DebertaV2Encoder):
    """Gives its layers the buckets of distances, not those of all pairs of tokens, and no mask."""

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """Return the mask as it is: attention does not read it."""
        return attention_mask

    def get_rel_pos(self, hidden_states: Tensor, query_states: object = None, relative_pos: object = None) -> Any:
        """Return the bucket of each distance; None: the config has no numbers for them."""
        if not self.relative_attention:
            return None
        first: Any = self.layer[0]
        reach, num_buckets = int(first.attention.config.max_position_embeddings), self.rel_embeddings.num_embeddings
        behind = torch.arange(reach, -reach - 1, -1, device=hidden_states.device)  # query minus key
        if self.position_buckets > 0:
            behind = make_log_bucket_position(behind, self.position_buckets, self.max_relative_positions).long()
        return (behind + num_buckets // 2).clamp(0, num_buckets - 1)


class _Conv(ConvLayer):
    """Fails: the rows of a step are several texts."""

    def forward(self, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        """Raise an error.

        :raises UnsupportedArchitectureError: always
        """
        raise refusal(self.config.model_type, "a convolution lets neighbouring tokens see each other")


REWRITTEN: Final = {DisentangledSelfAttention: _SelfAttention, DebertaV2Encoder: _Encoder, ConvLayer: _Conv}
