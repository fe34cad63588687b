"""Declares the C structures of ``csrc/abi_attention.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

__all__ = ["Attention", "Batch", "Cache", "Heads"]


class Cache(Structure):
    """Mirrors ``paged_cache``: the pages of one layer."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_scale", c_void_p),
        ("value_scale", c_void_p),
        ("key_offsets", c_void_p),
        ("key_factors", c_void_p),
    )


class Batch(Structure):
    """Mirrors ``paged_batch``: the sequences of a step."""

    _fields_ = (
        ("cu_seqlens_q", c_void_p),
        ("block_tables", c_void_p),
        ("context_lens", c_void_p),
        ("in_chunks", c_void_p),
        ("bidirectional_from", c_void_p),
        ("decompressed", c_void_p),
        ("num_seqs", c_int32),
        ("max_blocks", c_int32),
    )


class Heads(Structure):
    """Mirrors ``paged_heads``: the heads of one layer, and how their scores are computed."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("cache_dtype", c_int32),
        ("window", c_int32),
        ("window_reaches_ahead", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("products", c_int32),
        ("sinks", c_void_p),
    )


class Attention(Structure):
    """Mirrors ``paged_attention_args``: the arguments of attention."""

    _fields_ = (
        ("query", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("query_stride", c_int64),
        ("out_stride", c_int64),
        ("heads", Heads),
        ("cache", Cache),
        ("batch", Batch),
        ("dtype", c_int32),
        ("num_threads", c_int32),
    )
