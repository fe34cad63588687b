"""The C structures of ``csrc/abi.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

__all__ = ["ACTIVATIONS", "DTYPES", "Linear", "Mlp", "Weight"]

#: torch dtype -> its number in the C interface
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}

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


class Mlp(Structure):
    """``paged_mlp_args``."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("norm_weight", c_void_p),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("workspace", c_void_p),
        ("x_stride", c_int64),
        ("residual_stride", c_int64),
        ("out_stride", c_int64),
        ("num_rows", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("num_threads", c_int32),
        ("norm_eps", c_float),
        ("reserved", c_int32),
    )
