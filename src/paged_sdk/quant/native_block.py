"""Multiply weights in the native kernels' layout, at the file's own bits per weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import Linear, NativeWeights

__all__ = ["FEW_ROWS", "NativeBlockLinear"]

FEW_ROWS = 12
"""Up to this many rows packed weights are faster, because fewer bytes come from memory. Beyond, their int8 form is, as
arithmetic decides: on a 1.5B model 8 rows take 29 ms packed and 35 in int8, 12 take 42 and 38, 16 take 44 and 34."""


class NativeBlockLinear(Linear):
    """Multiplies packed matrices that share an input; their outputs lie side by side.

    :param workspace: the workspace of the engine that calls
    :param weights: the packed matrices, in the order of their outputs
    :param biases: one per weight, or None
    :param many_rows: the same weights in a form that is faster for more than ``few_rows`` rows; None: there is none
    """

    def __init__(
        self,
        workspace: Workspace,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        *,
        many_rows: Sequence[PackedWeight] | None = None,
        few_rows: int,
    ) -> None:
        few = tuple(weights)
        self._native = NativeWeights(few=few, many=few if many_rows is None else tuple(many_rows), biases=tuple(biases))
        self._few_rows = few_rows
        self._few = NativeLinear(workspace, weights, biases=biases)
        self._many = self._few if many_rows is None else NativeLinear(workspace, many_rows, biases=biases)

    @property
    def in_features(self) -> int:
        """Return columns of the weights."""
        return self._few.in_features

    @property
    def out_features(self) -> int:
        """Return rows of all weights."""
        return self._few.out_features

    @property
    def num_bytes(self) -> int:
        """Return the bytes of both forms together."""
        return self._few.num_bytes + (0 if self._many is self._few else self._many.num_bytes)

    @property
    def native_weights(self) -> NativeWeights:
        """Do what :attr:`Linear.native_weights` says."""
        return self._native

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward` says, in float32, bfloat16 or float16."""
        return self._few(x) if len(x) <= self._few_rows else self._many(x)
