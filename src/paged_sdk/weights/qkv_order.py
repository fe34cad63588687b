"""Say where the rows of queries, keys and values are in checkpoints that have them key head by key head."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["qkv_order", "runs"]


def qkv_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return which rows are all queries, then all keys, then all values, int64, of a matrix that has each key head
    behind its queries and before its values.
    """
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(num_kv_heads, -1, head_dim)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def runs(order: Tensor) -> list[tuple[int, int]]:
    """Cut numbers of rows into runs of which each is one more than the one before.

    :returns: the first number of each run, and the one after its last
    """
    ends = ((order[1:] - order[:-1]) != 1).nonzero().flatten() + 1
    return [(int(each[0]), int(each[-1]) + 1) for each in torch.tensor_split(order, ends) if len(each)]
