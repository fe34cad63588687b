"""Declares the C structures of ``csrc/abi_packing.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

__all__ = ["Codes", "DecodeGrouped", "Dense", "Grouped", "Quantize", "QuantizeGroups"]


class Codes(Structure):
    """Mirrors ``paged_codes``: the memory layout of a grouped matrix's codes."""

    _fields_ = (
        ("data", c_void_p),
        ("row_bytes", c_int64),
        ("word_bytes", c_int64),
        ("bits", c_int32),
        ("form", c_int32),
        ("mask", c_int32),
        ("flip", c_int32),
    )


class Grouped(Structure):
    """Mirrors ``paged_grouped_args``: the arguments of packing a grouped matrix."""

    _fields_ = (
        ("codes", Codes),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("levels", c_void_p),
        ("out", c_void_p),
        ("scale_factor", c_float),
        ("minimum_factor", c_float),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("num_threads", c_int32),
    )


class DecodeGrouped(Structure):
    """Mirrors ``paged_decode_grouped_args``: the arguments of decoding a grouped matrix."""

    _fields_ = (
        ("codes", Codes),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("levels", c_void_p),
        ("out", c_void_p),
        ("group_cols", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("num_threads", c_int32),
    )


class Dense(Structure):
    """Mirrors ``paged_dense_args``: the arguments of packing a dense matrix."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class Quantize(Structure):
    """Mirrors ``paged_quantize_args``: the arguments of quantizing a weight."""

    _fields_ = (
        ("x", c_void_p),
        ("importance", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )


class QuantizeGroups(Structure):
    """Mirrors ``paged_quantize_groups_args``: the arguments of quantizing a weight to groups of 64 columns."""

    _fields_ = (
        ("x", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("between", c_void_p),
        ("numbers", c_void_p),
        ("x_stride", c_int64),
        ("fit", c_int32),
        ("bits", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
    )
