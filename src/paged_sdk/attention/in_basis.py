"""Computes attention over pages whose keys and values are in a basis of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, LearnedScores
from paged_sdk.kernels.kv_basis import KvBasis
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.step import AttentionStep

__all__ = ["in_basis"]


def in_basis(step: AttentionStep, caches: Sequence[LayerCache]) -> AttentionStep:
    """Return a step that takes and returns heads in their own basis.

    :param step: takes and returns them in the basis of the pages
    :param caches: each layer's pages, its own or those that it attends over: all have a basis of their own, or none has
    """
    bases = [cache.basis for cache in caches if cache.basis is not None]
    return _InBasis(step, bases) if bases else step


class _InBasis(AttentionStep):
    """Changes the basis around another step. Fused layers, which call no step, do so themselves."""

    def __init__(self, step: AttentionStep, bases: Sequence[KvBasis]) -> None:
        self._step = step
        self._bases = bases

    @property
    def native_rows(self) -> NativeRows | None:
        return self._step.native_rows

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        basis = self._bases[layer]
        self._step.write(layer, basis.keys(key), basis.values(value))

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        basis = self._bases[layer]
        return basis.outputs(self._step.attend(layer, basis.queries(query), learned))
