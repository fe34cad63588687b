"""Holds the inputs of both paged attention kernels: queries, pages, rows and score options."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.triton.attention_codes import Decoder, as_pairs

__all__ = ["PagedBatch"]

_FP8_IN_HARDWARE: Final = (8, 9)
# Matrix instructions take at least this many elements of a row.
_LEAST_ELEMENTS: Final = 16


@functools.cache
def _decoder(device: torch.device, dtype: torch.dtype) -> Decoder:
    """Choose the decoder of f8e4m3 keys and values for queries of this dtype."""
    if device.type != "cuda" or dtype == torch.float32:
        return Decoder.PLAIN
    return Decoder.HARDWARE if torch.cuda.get_device_capability(device) >= _FP8_IN_HARDWARE else Decoder.INTEGER


@frozen(eq=False)
class PagedBatch:
    """Holds the inputs of paged attention as the kernels require them: the scale is positive, the last dimensions are
    contiguous.
    """

    query: Tensor
    cache: LayerCache
    rows: PagedRows
    scores: ScoreOptions

    @property
    def num_rows(self) -> int:
        """Return the number of rows: sequences, or parts of them."""
        return len(self.rows.context_lens)

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads."""
        return self.cache.num_kv_heads

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Return the number of elements per head of the values, and of the output that is written."""
        return self.query.shape[2] - self.cache.key_only

    @property
    def padded_size(self) -> int:
        """Return the padded size of values in a tile: a power of two and large enough for a matrix instruction. For a
        quantized cache, this holds for even and odd elements separately.
        """
        return self._padded(self.value_dim)

    def _padded(self, num_elements: int) -> int:
        parts = 2 if self.cache.quantized else 1
        elements = num_elements // parts
        return parts * max(_LEAST_ELEMENTS, 1 << (elements - 1).bit_length())  # triton.next_power_of_2 takes 1.4 us

    def arguments(self, output: Tensor) -> dict[str, Any]:
        """Return the arguments of a kernel that writes its results to ``output``."""
        query, cache, rows, scores = self.query, self.cache, self.rows, self.scores
        key_cache, value_cache = cache.key, cache.value
        k_scale, v_scale, key_offsets = cache.k_scale, cache.v_scale, cache.key_offsets
        assert query.shape[1] % self.num_kv_heads == 0, (query.shape, key_cache.shape)
        assert scores.scale > 0, scores.scale
        assert query.stride(2) == 1, query.stride()
        assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
        assert key_cache.stride() == value_cache.stride(), (key_cache.stride(), value_cache.stride())
        assert key_cache.stride(3) == 1, key_cache.stride()
        assert rows.block_tables.stride(1) == 1, rows.block_tables.stride()
        assert (k_scale is None) == (v_scale is None) == (key_cache.dtype != torch.float8_e4m3fn)
        assert key_offsets is None or (k_scale is not None and key_offsets.is_contiguous())
        assert key_offsets is None or not cache.values_are_keys, "offsets are subtracted from keys alone"
        scale_strides: tuple[int, ...] = (0, 0, 0)
        if k_scale is not None and v_scale is not None:
            assert k_scale.stride() == v_scale.stride(), (k_scale.stride(), v_scale.stride())
            scale_strides = k_scale.stride()
            assert query.shape[2] % 2 == 0, query.shape
            assert cache.key_only % 2 == 0, cache.key_only
            key_cache, value_cache = as_pairs(key_cache), as_pairs(value_cache)
        return {
            "output": output,
            "output_token_stride": output.stride(0),
            "output_head_stride": output.stride(1),
            "query": query,
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "key_cache": key_cache,
            "value_cache": None if cache.values_are_keys else value_cache,
            "k_scale": k_scale,
            "v_scale": None if cache.values_are_keys else v_scale,
            "key_offsets": key_offsets,
            "offset_stride": 0 if key_offsets is None else key_offsets.stride(0),
            "block_tables": rows.block_tables,
            "table_stride": rows.block_tables.stride(0),
            "block_stride": key_cache.stride(0),
            "slot_stride": key_cache.stride(1),
            "head_stride": key_cache.stride(2),
            "scale_block_stride": scale_strides[0],
            "scale_slot_stride": scale_strides[1],
            "scale_head_stride": scale_strides[2],
            "context_lens": rows.context_lens,
            "cu_seqlens_q": rows.cu_seqlens_q,
            "window": scores.window,
            "scale": scores.scale,
            "softcap": scores.softcap,
            "alibi_slopes": scores.alibi_slopes,
            "sinks": scores.sinks,
            "group": self.group,
            "head_dim": query.shape[2],
            "key_only": cache.key_only,
            "padded_size": self.padded_size,
            "padded_key_only": self._padded(cache.key_only) if cache.key_only else 0,
            "block_size": cache.block_size,
            "decoder": int(_decoder(query.device, query.dtype)) if cache.quantized else None,
            "upcast": not query.is_cuda,
        }
