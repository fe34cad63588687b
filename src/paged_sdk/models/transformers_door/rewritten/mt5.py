"""Rewrites the modules of MT5's encoder."""

from __future__ import annotations

from typing import Final

from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5DenseActDense, MT5DenseGatedActDense

from paged_sdk.models.transformers_door.t5_modules import BiasByDistance, Gated, Plain

__all__ = ["REWRITTEN"]


class _Attention(BiasByDistance, MT5Attention):
    pass


class _Plain(Plain, MT5DenseActDense):
    pass


class _Gated(Gated, MT5DenseGatedActDense):
    pass


REWRITTEN: Final = {MT5Attention: _Attention, MT5DenseActDense: _Plain, MT5DenseGatedActDense: _Gated}
