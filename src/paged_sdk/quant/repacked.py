"""Weights at the file's own bits per weight in a layout for GPUs, multiplied by Triton's kernels. To be imported where
Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from paged_sdk.kernels.gguf_blocks import BlockMatrix
from paged_sdk.kernels.repacked import RepackedMatrix, concatenate, repack
from paged_sdk.kernels.triton.quantised_linear import quantised_linear
from paged_sdk.quant.linear import Linear

__all__ = ["RepackedLinear"]


class RepackedLinear(Linear):
    """Matrices of one input, whose outputs lie side by side. Neighbours of one type are one launch.

    :param matrices: in the order of their outputs, each of a type in
        :data:`~paged_sdk.kernels.repacked.REPACKED_FORMATS`
    :param biases: one per matrix, of the model's dtype, or None
    :param device: where the weights are to be
    """

    def __init__(
        self, matrices: Sequence[BlockMatrix], biases: Sequence[Tensor | None], *, device: torch.device
    ) -> None:
        self._weights: list[RepackedMatrix] = []
        self._biases: list[Tensor | None] = []
        for tensor_type, pairs in groupby(zip(matrices, biases, strict=True), lambda pair: pair[0].tensor_type):
            own_matrices, own_biases = zip(*pairs, strict=True)
            self._weights.append(
                concatenate([repack(BlockMatrix(tensor_type, matrix.blocks.to(device))) for matrix in own_matrices])
            )
            self._biases.append(_side_by_side(own_biases, [matrix.shape[0] for matrix in own_matrices]))

    @property
    def in_features(self) -> int:
        """Columns of the weights."""
        return self._weights[0].cols

    @property
    def out_features(self) -> int:
        """Rows of all weights."""
        return sum(weight.rows for weight in self._weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and biases."""
        return sum(part.num_bytes for part in self._weights) + sum(b.nbytes for b in self._biases if b is not None)

    def forward(self, x: Tensor) -> Tensor:
        """See :meth:`Linear.forward`; float32, float16 or bfloat16."""
        outputs = [quantised_linear(x, weight, bias) for weight, bias in zip(self._weights, self._biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _side_by_side(biases: Sequence[Tensor | None], heights: Sequence[int]) -> Tensor | None:
    """The biases of several matrices as one, zero where a matrix has none; None: none has."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    return torch.cat(
        [like.new_zeros(rows) if bias is None else bias for bias, rows in zip(biases, heights, strict=True)]
    )
