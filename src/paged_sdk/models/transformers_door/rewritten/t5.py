"""Rewrites the modules of T5's encoder."""

from __future__ import annotations

from typing import Final

from transformers.models.t5.modeling_t5 import T5Attention, T5DenseActDense, T5DenseGatedActDense

from paged_sdk.models.transformers_door.t5_modules import BiasByDistance, Gated, Plain

__all__ = ["REWRITTEN"]


class _Attention(BiasByDistance, T5Attention):
    pass


class _Plain(Plain, T5DenseActDense):
    pass


class _Gated(Gated, T5DenseGatedActDense):
    pass


REWRITTEN: Final = {T5Attention: _Attention, T5DenseActDense: _Plain, T5DenseGatedActDense: _Gated}
