"""Describes a layer's latent attention to the native library: ``csrc/latent_attention.h``."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.linear import describe, float_vector, pointer
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.paged_attention import AttentionShape
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.structures import DTYPES, Latent

__all__ = ["MOST_DECOMPRESSED", "LatentAttention", "PackedLatentHeads"]

MOST_DECOMPRESSED: Final = 64 << 20
"""Bytes that keys and values made of a sequence's latent vectors may take at once. Those of one head always may."""


@frozen(eq=False, kw_only=True)
class PackedLatentHeads:
    """Holds the projections between latent vectors and heads, each head's below that of the one before.

    :ivar absorbing: [num_heads * rank, nope_dim], for queries over latent vectors: the transposed matrices of
        ``key_up``
    :ivar values: [num_heads * value_dim, rank], for results over latent vectors
    :ivar key_up: [num_heads * nope_dim, rank], for keys of whole prompts
    :ivar value_up: [num_heads * value_dim, rank], for values of whole prompts
    """

    absorbing: PackedWeight
    values: PackedWeight
    key_up: PackedWeight
    value_up: PackedWeight


@frozen(eq=False, kw_only=True)
class LatentAttention:
    """Holds what a layer with latent attention has in place of keys and values; sizes are multiples of 16.

    :ivar down: [rank + rope_dim, hidden]: projects to the latent vector, then the elements of the key that are rotated
    :ivar query_up: [num_heads * (nope_dim + rope_dim), query rank]: projects the layer's ``qkv``, which is normalized
        by ``query_norm`` before, to queries; both None: ``qkv`` are the queries
    :ivar norm: [rank], weight of the RMSNorm of latent vectors
    :ivar norm_eps: epsilon of both norms
    :ivar dtype: of the keys and values that prompts attend over
    :ivar most_bytes: what they may take at once; those of one head always may
    """

    down: Projection
    query_up: Projection | None = None
    heads: PackedLatentHeads
    query_norm: Tensor | None = None
    norm: Tensor
    norm_eps: float
    rope_dim: int
    dtype: torch.dtype
    most_bytes: int = MOST_DECOMPRESSED

    @property
    def rank(self) -> int:
        """Return the elements of a latent vector."""
        return self.heads.key_up.cols

    @property
    def nope_dim(self) -> int:
        """Return the elements of a query that are not rotated."""
        return self.heads.absorbing.cols

    def value_dim(self, shape: AttentionShape) -> int:
        """Return the elements of a head's result."""
        return self.heads.values.rows // shape.num_heads

    def query_width(self, shape: AttentionShape) -> int:
        """Return the elements of all heads' queries."""
        return shape.num_heads * (self.nope_dim + self.rope_dim)

    def check(self, shape: AttentionShape, query: Projection) -> None:
        """Check that all shapes fit.

        :param shape: describes attention over latent vectors
        :param query: the layer's ``qkv``
        :raises ConfigError: they do not
        """
        count, rank, nope_dim, value_dim = shape.num_heads, self.rank, self.nope_dim, self.value_dim(shape)
        if (self.query_up is None) != (self.query_norm is None):
            raise ConfigError.of("query_norm", self.query_norm, "given where query_up is")
        sizes = (rank, nope_dim, value_dim, self.rope_dim, *(() if self.query_up is None else (query.weight.rows,)))
        if any(size % 16 for size in sizes):
            raise ConfigError.of("sizes of latent attention", sizes, "multiples of 16")
        if shape.num_kv_heads != 1 or shape.head_dim != self.rope_dim + rank or shape.window is not None:
            raise ConfigError.of("shape", shape, f"one key of {self.rope_dim + rank} elements, and no window")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError.of("dtype", self.dtype, "float32, bfloat16 or float16")
        found = {name: (each.rows, each.cols) for name, each in self._of_heads()} | {
            "down": self.down.shape,
            "queries": (query if self.query_up is None else self.query_up).shape,
        }
        expected = {
            "absorbing": (count * rank, nope_dim),
            "values": (count * value_dim, rank),
            "key_up": (count * nope_dim, rank),
            "value_up": (count * value_dim, rank),
            "down": (rank + self.rope_dim, query.weight.cols),
            "queries": (self.query_width(shape), query.weight.cols if self.query_up is None else query.weight.rows),
        }
        if found != expected:
            raise ConfigError.of("shapes of latent attention", found, str(expected))
        for name, weight in self._of_heads():
            if weight.order is not None:
                raise ConfigError.of(name, "columns in an order of their own", "columns in the order of the input")

    def describe(self, target: Latent, shape: AttentionShape) -> list[Tensor | None]:
        """Fill the C structure, and return what must outlive it besides the matrices."""
        kept = [self.down.describe(target.down)]
        if self.query_up is not None:
            kept.append(self.query_up.describe(target.query_up))
            kept.append(float_vector("query_norm", self.query_norm, self.query_up.weight.cols))
            target.query_norm = pointer(kept[-1])
        for name, weight in self._of_heads():
            describe(getattr(target, name), weight, None)
        kept.append(float_vector("norm", self.norm, self.rank))
        target.norm, target.norm_eps = pointer(kept[-1]), self.norm_eps
        target.rank, target.rope_dim, target.nope_dim = self.rank, self.rope_dim, self.nope_dim
        target.most_decompressed = self.most_bytes
        target.value_dim, target.decompressed_dtype = self.value_dim(shape), DTYPES[self.dtype]
        return kept

    def _of_heads(self) -> list[tuple[str, PackedWeight]]:
        return [(name, getattr(self.heads, name)) for name in ("absorbing", "values", "key_up", "value_up")]
