"""Describes a matrix of a decoder layer with its bias."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.linear import describe, float_vector
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.structures import Weight

__all__ = ["Projection"]


@frozen(eq=False)
class Projection:
    """Holds a matrix and its bias.

    :ivar weight: [rows, cols], packed
    :ivar bias: [rows]; None: no bias
    """

    weight: PackedWeight
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the matrix's rows and columns."""
        return self.weight.rows, self.weight.cols

    def describe(self, target: Weight) -> Tensor | None:
        """Fill the C structure, and return what must outlive it besides the matrix.

        :raises ConfigError: the size of the bias differs from the number of rows
        """
        bias = float_vector("bias", self.bias, self.weight.rows)
        describe(target, self.weight, bias)
        return bias
