"""Declares the C structures of ``csrc/abi_sampling.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Final

import numpy as np

__all__ = ["DRAW_SETTINGS", "Argmax", "Draw", "Logprobs"]

DRAW_SETTINGS: Final = np.dtype(
    [("stream", "i8"), ("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8")]
)
"""Mirrors ``paged_draw_settings``: how the tokens of a row are drawn."""


class Argmax(Structure):
    """Mirrors ``paged_argmax_args``: the arguments of a row-wise argmax."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int32),
        ("cols", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Draw(Structure):
    """Mirrors ``paged_draw_args``: the arguments of drawing tokens."""

    _fields_ = (
        ("logits", c_void_p),
        ("settings", c_void_p),
        ("first_draws", c_void_p),
        ("streams", c_void_p),
        ("positions", c_void_p),
        ("proposed", c_void_p),
        ("tokens", c_void_p),
        ("workspace", c_void_p),
        ("stride", c_int64),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("num_proposed", c_int32),
        ("num_threads", c_int32),
    )


class Logprobs(Structure):
    """Mirrors ``paged_logprobs_args``: the arguments of computing logprobs."""

    _fields_ = (
        ("logits", c_void_p),
        ("chosen_rows", c_void_p),
        ("chosen_tokens", c_void_p),
        ("chosen_logprobs", c_void_p),
        ("top_tokens", c_void_p),
        ("top_logprobs", c_void_p),
        ("workspace", c_void_p),
        ("stride", c_int64),
        ("num_chosen", c_int64),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("top_n", c_int32),
        ("num_threads", c_int32),
    )
