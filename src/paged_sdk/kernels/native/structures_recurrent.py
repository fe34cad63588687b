"""Mirrors the structures of ``csrc/abi_recurrent.h``."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

__all__ = ["GatedDelta", "Mamba2", "RecurrentTokens", "ShortConv"]


class RecurrentTokens(Structure):
    """Mirrors ``paged_recurrent_rows``: the rows of a step, as recurrent layers take them."""

    _fields_ = (
        ("slots", c_void_p),
        ("first_tokens", c_void_p),
        ("is_new", c_void_p),
        ("num_replayed", c_void_p),
        ("num_earlier", c_void_p),
        ("num_drafts", c_void_p),
        ("guessed", c_void_p),
        ("num_rows", c_int32),
        ("reserved", c_int32),
    )


class ShortConv(Structure):
    """Mirrors ``paged_short_conv_args``: the arguments of a short convolution."""

    _fields_ = (
        ("rows", RecurrentTokens),
        ("x", c_void_p),
        ("gate_in", c_void_p),
        ("gate_out", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("pool", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("channels", c_int32),
        ("taps", c_int32),
        ("silu", c_int32),
        ("dtype", c_int32),
        ("pool_dtype", c_int32),
        ("num_threads", c_int32),
        ("most_drafts", c_int32),
        ("reserved", c_int32),
    )


class GatedDelta(Structure):
    """Mirrors ``paged_gated_delta_args``: the arguments of the gated delta rule with its norm and gates."""

    _fields_ = (
        ("rows", RecurrentTokens),
        ("inputs", c_void_p),
        ("rates", c_void_p),
        ("gates", c_void_p),
        ("rate", c_void_p),
        ("step_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("pool", c_void_p),
        ("kept", c_void_p),
        ("out", c_void_p),
        ("inputs_stride", c_int64),
        ("rates_stride", c_int64),
        ("gates_stride", c_int64),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("norm_eps", c_float),
        ("most_drafts", c_int32),
    )


class Mamba2(Structure):
    """Mirrors ``paged_mamba2_args``: the arguments of Mamba-2's state space with its gates and norm."""

    _fields_ = (
        ("rows", RecurrentTokens),
        ("inputs", c_void_p),
        ("steps", c_void_p),
        ("gates", c_void_p),
        ("rate", c_void_p),
        ("step_bias", c_void_p),
        ("skip", c_void_p),
        ("norm_weight", c_void_p),
        ("pool", c_void_p),
        ("kept", c_void_p),
        ("read", c_void_p),
        ("out", c_void_p),
        ("inputs_stride", c_int64),
        ("steps_stride", c_int64),
        ("gates_stride", c_int64),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("groups", c_int32),
        ("state_size", c_int32),
        ("norm_size", c_int32),
        ("gate_first", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("norm_eps", c_float),
        ("most_drafts", c_int32),
    )
