"""Rewrites the modules of UMT5's encoder."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5DenseActDense, UMT5DenseGatedActDense

from paged_sdk.models.transformers_door.t5_modules import BiasByDistance, Gated, Plain

__all__ = ["REWRITTEN"]


class _Attention(BiasByDistance, UMT5Attention):
    def buckets(self: Any, distances: Tensor) -> Tensor:
        found: Tensor = self._relative_position_bucket(distances)
        return found


class _Plain(Plain, UMT5DenseActDense):
    pass


class _Gated(Gated, UMT5DenseGatedActDense):
    pass


REWRITTEN: Final = {UMT5Attention: _Attention, UMT5DenseActDense: _Plain, UMT5DenseGatedActDense: _Gated}
