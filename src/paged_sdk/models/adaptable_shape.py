"""Describe to adapters which parts of a linear layer come from which matrices of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["outputs_of", "rows_of"]


def outputs_of(names: Sequence[str], heights: Sequence[int]) -> dict[str, slice]:
    """Return each matrix's slice of the layer's outputs; a single matrix has all.

    :param heights: number of outputs of each part of the layer
    """
    if len(names) == 1:
        return {names[0]: slice(0, sum(heights))}
    ends = accumulate(heights)
    return {name: slice(end - height, end) for name, height, end in zip(names, heights, ends, strict=True)}


def rows_of(names: Sequence[str], heights: Sequence[int], rows: Sequence[slice]) -> dict[str, Tensor]:
    """Return the shard's row numbers of each matrix; a single matrix is a concatenation of all parts.

    :param heights: number of rows of each part in the checkpoint
    :param rows: the shard's rows of each part
    """
    picked = [torch.arange(own.start, own.stop) for own in rows]
    if len(names) > 1:
        return dict(zip(names, picked, strict=True))
    ends = accumulate(heights)
    return {names[0]: torch.cat([each + end - height for each, height, end in zip(picked, heights, ends, strict=True)])}
