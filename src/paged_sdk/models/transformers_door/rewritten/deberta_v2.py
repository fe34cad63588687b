"""Rewrites the modules of DeBERTa's second and third version (He et al., 2021, arXiv 2111.09543)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    ConvLayer,
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from paged_sdk.kernels.relative_bias import RelativeBias
from paged_sdk.models.transformers_door.modules import apart, apart_by_adapter
from paged_sdk.models.transformers_door.seam import POSITION_BIAS, Mask, attention
from paged_sdk.models.transformers_door.skeleton import refusal

__all__ = ["REWRITTEN"]

# The layer whose keys ("c2p") or queries ("p2c") distances have: their own, or the tokens' (share_att_key).
_LAYERS: Final = {"c2p": ("pos_key_proj", "key_proj"), "p2c": ("pos_query_proj", "query_proj")}


class _SelfAttention(DisentangledSelfAttention):
    """Calls the attention interface, with numbers for each query and key."""

    # Keys and queries of distances without adapters. They depend on weights alone, and are computed once: over short
    # texts they take longer than the layer.
    _of_distances: Mapping[str, Tensor] = MappingProxyType({})

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
            bias = RelativeBias(
                relative_pos,
                of_queries=self._numbers("c2p", query * scale, rel_embeddings),
                of_keys=self._numbers("p2c", key * scale, rel_embeddings),
            )
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        options = {"scaling": scale, POSITION_BIAS: bias}
        # Each token sees the whole text.
        attended = attention(self, query, key, value, Mask(is_bidirectional=True), **options)
        return attended.flatten(2), None

    def _numbers(self, term: str, rows: Tensor, rel_embeddings: Tensor) -> Tensor | None:
        """Return the products of the tokens' queries with the keys of distances ("c2p"), or of keys with queries
        ("p2c"), ``[num_tokens, num_heads, num_buckets]``; None: the config does not use them.

        :param rows: ``[1, num_tokens, num_heads, head_dim]``
        """
        if term not in self.pos_att_type:
            return None
        layer: nn.Module = getattr(self, _LAYERS[term][self.share_att_key])
        if term not in self._of_distances or rel_embeddings.is_meta:
            self._of_distances = {**self._of_distances, term: apart(layer, rel_embeddings)}
        found = _products(rows[0], self._of_distances[term])
        for tokens, of_adapter in apart_by_adapter(layer, rel_embeddings, self._of_distances[term]):
            found[tokens] = _products(rows[0, tokens], of_adapter)
        return found


def _products(rows: Tensor, distances: Tensor) -> Tensor:
    """Return ``[num_rows, num_heads, num_buckets]``.

    :param rows: ``[num_rows, num_heads, head_dim]``
    :param distances: ``[num_buckets, num_heads * head_dim]``
    """
    heads = distances.view(len(distances), *rows.shape[1:]).transpose(0, 1)
    return (rows.transpose(0, 1) @ heads.mT).transpose(0, 1)


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
