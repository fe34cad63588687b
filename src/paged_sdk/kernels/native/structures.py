"""The C structures of ``csrc/abi.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "WEIGHT_DTYPES",
    "Attention",
    "Batch",
    "Cache",
    "Decoder",
    "Experts",
    "Hadamard",
    "Heads",
    "Layer",
    "Linear",
    "Quantize",
    "Rope",
    "Router",
    "Weight",
]

#: torch dtype -> its number in the C interface
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float16: 3}

#: torch dtype of weights to be quantized -> its number in the C interface
WEIGHT_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}

#: name of a feed-forward activation -> its number in the C interface
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Weight(Structure):
    """``paged_weight``: a packed matrix and its bias."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("reserved", c_int32),
    )


class Linear(Structure):
    """``paged_linear_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("norm_weight", c_void_p),
        ("weights", c_void_p),
        ("workspace", c_void_p),
        ("x_stride", c_int64),
        ("residual_stride", c_int64),
        ("out_stride", c_int64),
        ("num_weights", c_int32),
        ("num_rows", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("norm_eps", c_float),
        ("reserved", c_int32),
    )


class Experts(Structure):
    """``paged_experts_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("topk_weights", c_void_p),
        ("topk_ids", c_void_p),
        ("workspace", c_void_p),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_experts", c_int32),
        ("num_tokens", c_int32),
        ("num_selected", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Cache(Structure):
    """``paged_cache``."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_scale", c_void_p),
        ("value_scale", c_void_p),
        ("key_offsets", c_void_p),
    )


class Batch(Structure):
    """``paged_batch``."""

    _fields_ = (
        ("cu_seqlens_q", c_void_p),
        ("block_tables", c_void_p),
        ("context_lens", c_void_p),
        ("num_seqs", c_int32),
        ("max_blocks", c_int32),
    )


class Heads(Structure):
    """``paged_heads``."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("cache_dtype", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("exact", c_int32),
    )


class Attention(Structure):
    """``paged_attention_args``."""

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


class Router(Structure):
    """``paged_router``."""

    _fields_ = (
        ("weight", c_void_p),
        ("dtype", c_int32),
        ("num_experts", c_int32),
        ("num_selected", c_int32),
        ("renormalize", c_int32),
    )


class Rope(Structure):
    """``paged_rope``."""

    _fields_ = (
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("half", c_int32),
        ("reserved", c_int32),
    )


class Layer(Structure):
    """``paged_layer``."""

    _fields_ = (
        ("qkv", Weight * 3),
        ("output", Weight),
        ("router", Router),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("attention_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("heads", Heads),
        ("cache", Cache),
        ("num_qkv", c_int32),
        ("rope", c_int32),
        ("activation", c_int32),
        ("norm_eps", c_float),
    )


class Decoder(Structure):
    """``paged_decoder_args``."""

    _fields_ = (
        ("hidden", c_void_p),
        ("ropes", c_void_p),
        ("slots", c_void_p),
        ("layers", c_void_p),
        ("workspace", c_void_p),
        ("batch", Batch),
        ("num_layers", c_int32),
        ("num_rows", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Hadamard(Structure):
    """``paged_hadamard_args``."""

    _fields_ = (
        ("packed", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int32),
        ("cols", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Quantize(Structure):
    """``paged_quantize_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )
