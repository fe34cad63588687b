"""Reorder rows that are stored in groups: those of fused QKV matrices by KV head, those of value heads by key head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_order", "grouped_heads", "qkv_order", "qkvz_order", "rows_of_heads", "runs", "tiled_heads"]


def qkv_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the row indices, int64, that reorder a fused QKV matrix to all queries, all keys, all values. In the
    stored matrix each KV head has its query heads' rows, then its key rows, then its value rows.
    """
    return group_order(num_kv_heads, [num_heads // num_kv_heads * head_dim, head_dim, head_dim])


def qkvz_order(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> Tensor:
    """Return the row indices, int64, that reorder the fused projection of gated delta networks to all queries, all
    keys, all values, all output gates. In the stored matrix each key head has its own rows of each, in this order.
    """
    per_group = num_value_heads // num_key_heads * value_dim
    return group_order(num_key_heads, [key_dim, key_dim, per_group, per_group])


def group_order(num_groups: int, heights: Sequence[int]) -> Tensor:
    """Return the permutation of rows, int64, that puts the same parts of all groups side by side.

    :param heights: rows of each part of a group
    """
    rows = torch.arange(num_groups * sum(heights)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(heights), 1)])


def tiled_heads(num_key_heads: int, num_value_heads: int) -> Tensor:
    """Return the permutation of value heads, int64, that takes the first head of every key head, then the second of
    each, and so on, from an order in which the heads of each key head are side by side.
    """
    return torch.arange(num_value_heads).view(num_key_heads, -1).T.flatten()


def grouped_heads(num_key_heads: int, num_value_heads: int) -> Tensor:
    """Return the inverse of :func:`tiled_heads`."""
    return torch.arange(num_value_heads).view(-1, num_key_heads).T.flatten()


def rows_of_heads(heads: Tensor, width: int, before: int = 0) -> Tensor:
    """Return the row indices, int64, of heads in an order.

    :param heads: indices of heads
    :param width: rows of a head
    :param before: rows before those of the heads, which stay in their places
    """
    rows = before + heads.unsqueeze(1) * width + torch.arange(width)
    return torch.cat([torch.arange(before), rows.flatten()])


def runs(order: Tensor) -> list[tuple[int, int]]:
    """Split row indices into runs of consecutive numbers.

    :returns: the first index of each run, and the index after its last
    """
    ends = ((order[1:] - order[:-1]) != 1).nonzero().flatten() + 1
    return [(int(each[0]), int(each[-1]) + 1) for each in torch.tensor_split(order, ends) if len(each)]
