"""Name the ways in which hidden states become one vector."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["POOLINGS", "Pooling"]

Pooling: TypeAlias = Literal["last", "mean", "cls", "max", "weighted_mean"]
"""How the hidden states of a text become one vector.

``last``: the last token's, which alone has seen the whole text of a decoder. ``mean``: the mean of all. ``cls``: the
first token's. ``max``: the largest of each element. ``weighted_mean``: the mean, with each token as many times as its
place says, from 1 on.
"""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
