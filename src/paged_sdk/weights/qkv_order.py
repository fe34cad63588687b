"""Reorder the rows of fused QKV matrices that are stored grouped by KV head."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["qkv_order", "runs"]


def qkv_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the row indices, int64, that reorder a fused QKV matrix to all queries, all keys, all values. In the
    stored matrix each KV head has its query heads' rows, then its key rows, then its value rows.
    """
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(num_kv_heads, -1, head_dim)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def runs(order: Tensor) -> list[tuple[int, int]]:
    """Split row indices into runs of consecutive numbers.

    :returns: the first index of each run, and the index after its last
    """
    ends = ((order[1:] - order[:-1]) != 1).nonzero().flatten() + 1
    return [(int(each[0]), int(each[-1]) + 1) for each in torch.tensor_split(order, ends) if len(each)]
