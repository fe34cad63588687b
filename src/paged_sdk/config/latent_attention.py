"""Describe multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434)."""

from __future__ import annotations

from attrs import frozen

__all__ = ["LatentAttentionConfig"]


@frozen(kw_only=True)
class LatentAttentionConfig:
    """Describes attention whose keys and values are projections of one latent vector per token.

    Only that vector is kept per token and layer, with a rotated key that all heads share: it is the one key and value
    of all query heads, since the projections of keys and values can be applied to queries and outputs instead.

    :ivar rank: elements of a token's latent vector (``kv_lora_rank``)
    :ivar rope_dim: elements of the rotated key, and of the rotated part of each query (``qk_rope_head_dim``)
    :ivar nope_dim: elements of each query that are not rotated (``qk_nope_head_dim``)
    :ivar value_dim: elements of each head's output (``v_head_dim``)
    :ivar query_rank: elements of the latent vector that queries are projected from (``q_lora_rank``); None: they are
        projected from the hidden state
    :ivar norm_eps: epsilon of the norms of latent vectors
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Return the elements of a query as the checkpoint projects it: those that are not rotated, then the others."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Return the elements of the key that is kept: the rotated ones, then the latent vector."""
        return self.rope_dim + self.rank
