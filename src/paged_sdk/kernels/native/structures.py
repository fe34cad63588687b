"""Declares the C structures of ``csrc/abi.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch

from paged_sdk.kernels.native.structures_attention import Batch, Cache, Heads
from paged_sdk.kernels.native.structures_recurrent import GatedDelta, Mamba2, RecurrentTokens, ShortConv
from paged_sdk.kernels.native.structures_routing import Choice

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "WEIGHT_DTYPES",
    "Decoder",
    "Experts",
    "HeadProduct",
    "Latent",
    "Layer",
    "Linear",
    "Mixture",
    "Norm",
    "Ranks",
    "Recurrent",
    "Rope",
    "Rows",
    "Update",
    "Weight",
]

#: Maps a torch dtype to its number in the C interface.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float16: 3, torch.uint8: 4}

#: Maps the torch dtype of weights to be quantized or packed to its number in the C interface.
WEIGHT_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}

#: Maps the name of an MLP's activation to its number in the C interface.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2}


class Weight(Structure):
    """Mirrors ``paged_weight``: a packed matrix and its bias."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("in_hadamard", c_int32),
    )


class Linear(Structure):
    """Mirrors ``paged_linear_args``: the arguments of linear layers."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("norm_weight", c_void_p),
        ("likeliest", c_void_p),
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


class HeadProduct(Structure):
    """Mirrors ``paged_head_product_args``: the arguments of products of heads with matrices of their own."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
        ("weight", Weight),
        ("x_stride", c_int64),
        ("x_head_stride", c_int64),
        ("out_stride", c_int64),
        ("out_head_stride", c_int64),
        ("num_heads", c_int32),
        ("num_rows", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
    )


class Experts(Structure):
    """Mirrors ``paged_experts_args``: the arguments of a mixture of experts."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("topk_weights", c_void_p),
        ("topk_ids", c_void_p),
        ("workspace", c_void_p),
        ("gather", c_void_p),
        ("group", c_void_p),
        ("inner_widths", c_void_p),
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
        ("swiglu_alpha", c_float),
        ("swiglu_limit", c_float),
        ("activation", c_int32),
    )


class Mixture(Structure):
    """Mirrors ``paged_mixture``: a layer's experts."""

    _fields_ = (
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("router_norm", c_void_p),
        ("input_norm", c_void_p),
        ("output_norm", c_void_p),
        ("dense_output_norm", c_void_p),
        ("mlp_gate", c_void_p),
        ("inner_widths", c_void_p),
        ("choice", Choice),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("router_dtype", c_int32),
        ("activation", c_int32),
        ("swiglu_alpha", c_float),
        ("swiglu_limit", c_float),
    )


class Rope(Structure):
    """Mirrors ``paged_rope``: one rotary embedding at a step's positions."""

    _fields_ = (
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("query_scales", c_void_p),
        ("frequencies", c_void_p),
        ("factor", c_float),
        ("query_scale_beta", c_float),
        ("query_scale_length", c_int32),
        ("half", c_int32),
        ("interleaved", c_int32),
        ("reserved", c_int32),
    )


class Latent(Structure):
    """Mirrors ``paged_latent``: what a layer's latent attention has besides that of other attention."""

    _fields_ = (
        ("down", Weight),
        ("query_up", Weight),
        ("absorbing", Weight),
        ("values", Weight),
        ("key_up", Weight),
        ("value_up", Weight),
        ("query_norm", c_void_p),
        ("norm", c_void_p),
        ("rank", c_int32),
        ("rope_dim", c_int32),
        ("nope_dim", c_int32),
        ("value_dim", c_int32),
        ("norm_eps", c_float),
        ("decompressed_dtype", c_int32),
        ("most_decompressed", c_int64),
    )


class Recurrent(Structure):
    """Mirrors ``paged_recurrent``: what a layer has in the place of attention."""

    _fields_ = (
        ("conv", ShortConv),
        ("delta", GatedDelta),
        ("scan", Mamba2),
        ("rates", Weight * 2),
        ("num_rates", c_int32),
        ("reserved", c_int32),
    )


class Layer(Structure):
    """Mirrors ``paged_layer``: the weights and settings of one decoder layer."""

    _fields_ = (
        ("qkv", Weight * 4),
        ("output", Weight),
        ("latent", Latent),
        ("recurrent", Recurrent),
        ("mixture", Mixture),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("input_gate", Weight),
        ("input_output", Weight),
        ("input_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("attention_norm_bias", c_void_p),
        ("mlp_norm_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("query_norm_bias", c_void_p),
        ("key_norm_bias", c_void_p),
        ("attended_widths", c_void_p),
        ("inner_widths", c_void_p),
        ("hidden_widths", c_void_p),
        ("xielu", c_void_p),
        ("heads", Heads),
        ("cache", Cache),
        ("num_qkv", c_int32),
        ("rope", c_int32),
        ("activation", c_int32),
        ("norm_eps", c_float),
        ("qkv_clip", c_float),
        ("norm", c_int32),
        ("head_norm", c_int32),
        ("parallel", c_int32),
        ("first_hidden", c_int32),
        ("shares_keys", c_int32),
        ("keys_as_values", c_int32),
        ("value_norm", c_int32),
        ("norms_last", c_int32),
        ("gates", c_int32),
        ("input_column", c_int32),
        ("scale", c_float),
    )


class Decoder(Structure):
    """Mirrors ``paged_decoder_args``: the arguments of a stack of decoder layers."""

    _fields_ = (
        ("hidden", c_void_p),
        ("ropes", c_void_p),
        ("slots", c_void_p),
        ("layers", c_void_p),
        ("workspace", c_void_p),
        ("batch", Batch),
        ("recurrent", RecurrentTokens),
        ("cu_seqlens_read", c_void_p),
        ("adapters", c_void_p),
        ("adapter_of_row", c_void_p),
        ("sum", c_void_p),
        ("gather", c_void_p),
        ("group", c_void_p),
        ("layer_inputs", c_void_p),
        ("layer_input_stride", c_int64),
        ("original_rows", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("embedding", Weight),
        ("embedding_scale", c_float),
        ("stream_scale", c_float),
        ("num_layers", c_int32),
        ("num_rows", c_int32),
        ("num_threads", c_int32),
        ("num_adapters", c_int32),
        ("num_ropes", c_int32),
        ("hidden_size", c_int32),
    )


class Ranks(Structure):
    """Mirrors ``paged_ranks``: one rank's view of the shared memory."""

    _fields_ = (
        ("memory", c_void_p),
        ("capacity", c_int64),
        ("turn", c_uint64),
        ("rank", c_int32),
        ("size", c_int32),
        ("failed", c_int32),
        ("reserved", c_int32),
    )


class Update(Structure):
    """Mirrors ``paged_update``: an adapter's update of one matrix."""

    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("gains", c_void_p),
        ("rank", c_int32),
        ("rows", c_int32),
        ("first", c_int32),
        ("dtype", c_int32),
    )


class Norm(Structure):
    """Mirrors ``paged_norm_args``: the arguments of a norm."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("norm", c_int32),
        ("eps", c_float),
        ("rows", c_int32),
        ("cols", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Rows(Structure):
    """Mirrors ``paged_rows_args``: the arguments of decoding rows of a weight."""

    _fields_ = (
        ("weight", c_void_p),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int32),
        ("num_threads", c_int32),
    )
