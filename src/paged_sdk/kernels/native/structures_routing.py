"""Declares the C structures of ``csrc/abi_routing.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_void_p

__all__ = ["Choice", "Route"]


class Choice(Structure):
    """Mirrors ``paged_choice``: how experts are chosen."""

    _fields_ = (
        ("bias", c_void_p),
        ("factors", c_void_p),
        ("num_experts", c_int32),
        ("num_selected", c_int32),
        ("scoring", c_int32),
        ("num_groups", c_int32),
        ("num_groups_selected", c_int32),
        ("group_score_size", c_int32),
        ("renormalize", c_int32),
        ("min_sum", c_float),
        ("sum_offset", c_float),
        ("scale", c_float),
        ("margin", c_float),
        ("reserved", c_int32),
    )


class Route(Structure):
    """Mirrors ``paged_route_args``: the arguments of a choice of experts."""

    _fields_ = (
        ("scores", c_void_p),
        ("topk_weights", c_void_p),
        ("topk_ids", c_void_p),
        ("workspace", c_void_p),
        ("choice", Choice),
        ("num_tokens", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    )
