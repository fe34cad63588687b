"""Attends with prompt tokens over keys and values of heads, decompressed from the latent vectors of a sequence.

Over latent vectors, a query's product with a key has 576 elements and a weight's with a value as many (DeepSeek-V2);
over heads, it is 192 and 128. But each key is decompressed first, which pays if many queries see it. This is for layers
that run one operation at a time; the native decoder does the same in ``csrc/latent_attention.h``.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.kv_cache import gather_slots
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.latent_attention import MOST_DECOMPRESSED
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention

__all__ = ["DecompressedHeads", "DecompressedRow", "most_decompressed_bytes", "pays_to_decompress"]

# The time of a projection's multiplication, of keys to heads, in that of attention's. On AVX2, 512 tokens of 4,096 of
# DeepSeek-V2-Lite take as long either way with projections in bfloat16, which so take 3 times as long, and 0.73 of the
# time in 8-bit blocks, which take 1.7 times as long. Matrix units have not been measured.
_PROJECTION_COST: Final = 2

# A row has calls of its own, which take as long as attention of some tens of tokens.
_FEWEST_TOKENS: Final = 32

_KEYS_AT_ONCE: Final = 4096  # gathered and projected together
_MULTIPLE: Final = 16  # of a head's elements, for the native kernels


def pays_to_decompress(shape: LatentAttentionConfig, num_tokens: int, context_len: int) -> bool:
    """Return whether the last tokens of a sequence attend faster over decompressed keys.

    The multiplications of one head are compared. Absorbing, too, multiplies each token by the projections, so that a
    prompt's first chunk is always decompressed, and later ones from some number of tokens on: DeepSeek-V2's from 340.

    :param num_tokens: the sequence's tokens in a step
    :param context_len: keys of the sequence, those of these tokens included
    """
    if num_tokens < _FEWEST_TOKENS:
        return False
    pairs = num_tokens * (2 * context_len - num_tokens + 1) // 2
    projection = _PROJECTION_COST * shape.rank * (shape.nope_dim + shape.value_dim)
    absorbed = pairs * 2 * shape.key_dim + num_tokens * projection
    decompressed = pairs * 2 * _head_dim(shape) + context_len * projection
    return decompressed < absorbed


def most_decompressed_bytes(shape: LatentAttentionConfig, dtype: torch.dtype, context_len: int) -> int:
    """Return the bytes that decompressed keys and values take, for sequences up to a length."""
    return max(MOST_DECOMPRESSED, context_len * _bytes_per_key(shape, dtype))


def _bytes_per_key(shape: LatentAttentionConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a head's key and value."""
    return 2 * _head_dim(shape) * dtype.itemsize


def _head_dim(shape: LatentAttentionConfig) -> int:
    """Return the elements of keys and values for the kernels, which take both in one size."""
    return -(-max(shape.query_dim, shape.value_dim) // _MULTIPLE) * _MULTIPLE


@frozen(eq=False)
class DecompressedRow:
    """Locates the tokens of one sequence in a step, and its keys.

    :ivar first: the first of the tokens; ``last`` likewise, exclusive
    :ivar slots: ``[context_len]`` int64: the slots of the sequence's latent vectors
    """

    first: int
    last: int
    slots: Tensor


class DecompressedHeads:
    """Decompresses keys and values into memory that is reused, for some heads at a time, and attends over them.

    :param workspace: scratch memory of the calling engine
    :param dtype: of queries, keys and values
    """

    def __init__(self, shape: LatentAttentionConfig, workspace: Workspace, dtype: torch.dtype) -> None:
        self._shape = shape
        self._workspace = workspace
        self._head_dim = _head_dim(shape)
        self._memory = torch.empty(2, 0, self._head_dim, dtype=dtype)

    def attend(
        self,
        row: DecompressedRow,
        rotated: Tensor,
        unrotated: Tensor,
        cache: LayerCache,
        heads: LatentHeads,
        attention: AttentionShape,
        out: Tensor,
    ) -> None:
        """Attend with a row's tokens, whose latent vectors have been written.

        :param rotated: ``[num_tokens, num_heads, rope_dim]``: the rotated elements of all queries of the step
        :param unrotated: ``[num_tokens, num_heads, nope_dim]``: the others
        :param cache: the layer's pages of latent vectors
        :param attention: describes attention over them
        :param out: ``[num_tokens, num_heads, value_dim]``: the row's part is written
        """
        tokens, context_len = slice(row.first, row.last), len(row.slots)
        rope_dim, query_dim = self._shape.rope_dim, self._shape.query_dim
        query = rotated.new_zeros(row.last - row.first, heads.num_heads, self._head_dim)
        query[..., :rope_dim] = rotated[tokens]
        query[..., rope_dim:query_dim] = unrotated[tokens]
        batch = VarlenBatch(
            cu_seqlens_q=torch.tensor([0, len(query)], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=torch.tensor([context_len], dtype=torch.int32),
            in_chunks=torch.ones(1, dtype=torch.uint8),
        )
        most = max(1, MOST_DECOMPRESSED // (context_len * _bytes_per_key(self._shape, self._memory.dtype)))
        num_groups = -(-heads.num_heads // most)
        count = -(-heads.num_heads // num_groups)
        for first in range(0, heads.num_heads, count):
            own = slice(first, min(first + count, heads.num_heads))
            pages = self._decompressed(row.slots, cache, heads, own)
            over_heads = evolve(
                attention, num_heads=own.stop - first, num_kv_heads=own.stop - first, head_dim=self._head_dim
            )
            attended = native_paged_attention(self._workspace, query[:, own], pages, batch, over_heads)
            out[tokens, own] = attended[..., : self._shape.value_dim]

    def _decompressed(self, slots: Tensor, cache: LayerCache, heads: LatentHeads, own: slice) -> LayerCache:
        """Return keys and values of some heads, as one block."""
        rope_dim, query_dim = self._shape.rope_dim, self._shape.query_dim
        count, context_len = own.stop - own.start, len(slots)
        keys, values = (
            half[: context_len * count].view(context_len, count, -1) for half in self._reserve(context_len * count)
        )
        for first in range(0, context_len, _KEYS_AT_ONCE):
            span = slice(first, min(first + _KEYS_AT_ONCE, context_len))
            latents = gather_slots(cache.key, slots[span], cache.k_scale, self._memory.dtype)
            keys[span, :, :rope_dim] = latents[..., :rope_dim]
            heads.decompress(
                latents[:, 0, rope_dim:],
                keys[span, :, rope_dim:query_dim],
                values[span, :, : heads.value_dim],
                own.start,
            )
        return LayerCache(keys[None], values[None])

    def _reserve(self, num_vectors: int) -> Tensor:
        """Return memory for vectors of keys and as many of values. Elements that are never written are zero."""
        if self._memory.shape[1] < num_vectors:
            self._memory = self._memory.new_empty(0)  # freed first
            self._memory = self._memory.new_zeros(2, num_vectors, self._head_dim)
        return self._memory
