"""Defines the projections between latent vectors and heads (DeepSeek-AI, 2024, arXiv 2405.04434), for attention steps.

A head's key is a projection of a token's latent vector, so its product with a query is that of the latent vector with
the query after the transposed projection: the query *absorbs* it. A weighted sum of values is, likewise, the projection
of the weighted sum of latent vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["LatentHeads"]


class LatentHeads(ABC):
    """Projects a layer's latent vectors to the keys and values of its heads, or queries and results back.

    :ivar num_heads: query heads, each with keys and values of its own
    :ivar rank: elements of a latent vector
    :ivar nope_dim: elements of a head's key that are not rotated
    :ivar value_dim: elements of a head's value
    :ivar num_bytes: bytes of the projections as stored
    :ivar format: how they are stored: the name of a dtype, or ggml's of a type of blocks
    """

    def __init__(
        self, *, num_heads: int, rank: int, nope_dim: int, value_dim: int, num_bytes: int, format: str
    ) -> None:
        self.num_heads: int = num_heads
        self.rank: int = rank
        self.nope_dim: int = nope_dim
        self.value_dim: int = value_dim
        self.num_bytes: int = num_bytes
        self.format: str = format

    @abstractmethod
    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Write the vectors whose products with latent vectors are those of queries with keys.

        :param queries: ``[num_tokens, num_heads, nope_dim]``, the elements that are not rotated
        :param out: ``[num_tokens, num_heads, rank]``, may be a view
        """

    @abstractmethod
    def values(self, latents: Tensor) -> Tensor:
        """Return the values of weighted sums of latent vectors.

        :param latents: ``[num_tokens, num_heads, rank]``, may be a view
        :returns: ``[num_tokens, num_heads, value_dim]``, contiguous
        """

    @property
    def decompresses(self) -> bool:
        """Return whether :meth:`decompress` is fast enough for prompts."""
        return False

    def decompress(self, latents: Tensor, keys: Tensor, values: Tensor, first: int) -> None:
        """Write keys and values of some heads.

        :param latents: ``[num_keys, rank]``, may be a view
        :param keys: ``[num_keys, n, nope_dim]``: the elements that are not rotated, of n heads; may be a view
        :param values: ``[num_keys, n, value_dim]``, may be a view
        :param first: the first of the heads
        """
        raise AssertionError(f"{type(self).__name__} does not decompress")
