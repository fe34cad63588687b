"""Name the poolings that turn a text's hidden states into one vector."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["POOLINGS", "Pooling"]

Pooling: TypeAlias = Literal["last", "mean", "cls", "max", "weighted_mean"]
"""Names how the hidden states of a text are pooled into one vector.

``last``: the last token's; in a decoder only this token has attended to the whole text. ``mean``: the mean over all
tokens. ``cls``: the first token's. ``max``: the elementwise maximum. ``weighted_mean``: the mean weighted by position,
counted from 1.
"""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
