"""Define the interface of linear layers: dense, quantized, adapted, sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation, gated_activation, gated_activation_reference
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.step import StepContext

__all__ = ["DecodedRows", "Linear", "NativeWeights", "concatenated_biases", "decoded_matrices"]

_ROWS_AT_ONCE: Final = 256  # decoded at a time: 1.5 MB with 1536 columns, which fits the caches


@frozen(eq=False, kw_only=True)
class NativeWeights:
    """Holds the packed matrices of a linear layer, for the native CPU kernels.

    :ivar few: the matrices for products with few rows, in the order of their outputs
    :ivar many: the same matrices for products with many rows; ``few`` itself if there is no difference
    :ivar biases: one per matrix, or None where a matrix has none
    """

    few: tuple[PackedWeight, ...]
    many: tuple[PackedWeight, ...]
    biases: tuple[Tensor | None, ...]


@frozen(eq=False)
class DecodedRows:
    """Holds decoded rows of a linear layer's weight.

    :ivar first: the index of the first row
    :ivar weight: ``[num_rows, in_features]`` float32
    :ivar bias: ``[num_rows]`` float32
    """

    first: int
    weight: Tensor
    bias: Tensor


def decoded_matrices(weights: NativeWeights, decode: Callable[[PackedWeight, Tensor], Tensor]) -> Iterator[DecodedRows]:
    """Yield the decoded rows of native weights, some at a time.

    :param decode: returns rows of a matrix in float32, given their indices
    """
    before = 0
    for weight, bias in zip(weights.few, weights.biases, strict=True):
        for first in range(0, weight.rows, _ROWS_AT_ONCE):
            rows = torch.arange(first, min(first + _ROWS_AT_ONCE, weight.rows))
            own = torch.zeros(len(rows), dtype=torch.float32) if bias is None else bias[rows].float()
            yield DecodedRows(before + first, decode(weight, rows), own)
        before += weight.rows


def concatenated_biases(biases: Sequence[Tensor | None], heights: Sequence[int]) -> Tensor | None:
    """Concatenate the biases of several matrices, zero where a matrix has none; None if no matrix has any.

    :param heights: the rows of each matrix
    """
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    return torch.cat(
        [like.new_zeros(rows) if bias is None else bias for bias, rows in zip(biases, heights, strict=True)]
    )


class Linear(ABC):
    """Computes ``x @ weight.T + bias``, however the weight is stored.

    :ivar in_features: columns of the weight
    :ivar out_features: rows of the weight
    :ivar num_bytes: bytes of the weights as stored
    """

    def __init__(self, *, in_features: int, out_features: int, num_bytes: int) -> None:
        self.in_features: int = in_features
        self.out_features: int = out_features
        self.num_bytes: int = num_bytes

    @property
    def native_weights(self) -> NativeWeights | None:
        """Return the weights for a native call that fuses several layers; None: this form has no native kernel."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Multiply rows by the weight and add the bias.

        :param x: ``[num_rows, in_features]`` of the model's dtype
        :param ctx: the step whose tokens the rows are; None: the rows do not correspond to a step's tokens, as for
            the output projection
        :returns: ``[num_rows, out_features]`` of the same dtype, contiguous; the caller may modify it
        """

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Yield the weight's rows in order, as the values that the form multiplies by. May be called from any thread.

        The default multiplies unit vectors, for forms without a faster way.

        :param device: the device of the weight
        """
        bias = self.forward(torch.zeros(1, self.in_features, dtype=torch.float32, device=device), None)
        columns = self.forward(torch.eye(self.in_features, dtype=torch.float32, device=device), None)
        yield DecodedRows(0, (columns - bias).T, bias[0])

    def forward_gated(self, x: Tensor, activation: KernelActivation, ctx: StepContext | None) -> Tensor:
        """Compute ``activation(gate) * up``, where gate is the first half of the outputs and up the second (Shazeer,
        2020, arXiv 2002.05202).

        :param x: see :meth:`forward`
        :param ctx: see :meth:`forward`
        :returns: ``[num_rows, out_features / 2]`` of the same dtype
        """
        gate_up = self.forward(x, ctx)
        activate = gated_activation if gate_up.is_cuda else gated_activation_reference
        return activate(gate_up, activation)
