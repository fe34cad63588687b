"""Multiply weights and activations in int8 after a Hadamard transform, by torch: for machines without the native
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.hadamard import hadamard_quantize
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import Linear, concatenated_biases

__all__ = ["HadamardInt8Linear"]

_ROWS_AT_ONCE: Final = 1024
_ZERO: Final = 128  # zero point: activations are uint8, as oneDNN has no fast kernel for int8 activations


class HadamardInt8Linear(Linear):
    """Multiplies matrices that share an input, with int8 weights (one scale per output) and int8 activations (one scale
    per row).

    :param matrices: in the order of their outputs
    :param biases: one per matrix, or None
    """

    def __init__(self, matrices: Sequence[BlockMatrix], biases: Sequence[Tensor | None]) -> None:
        rows, cols = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        weight = torch.empty(rows, cols, dtype=torch.int8)
        self._scales = torch.empty(rows, dtype=torch.float32)
        super().__init__(in_features=cols, out_features=rows, num_bytes=weight.nbytes + self._scales.nbytes)
        first = 0
        for matrix in matrices:
            for blocks in torch.split(matrix.blocks, _ROWS_AT_ONCE):
                part = slice(first, first + len(blocks))
                weight[part], self._scales[part] = hadamard_quantize(BlockMatrix(matrix.tensor_type, blocks).decoded())
                first += len(blocks)
        self._weight = torch.ops.onednn.qlinear_prepack(weight, None)
        self._zero_points = torch.zeros(rows, dtype=torch.int64)
        self._halves = _saturates()
        self._bias = concatenated_biases(biases, [matrix.shape[0] for matrix in matrices])

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`."""
        codes, scales = hadamard_quantize(x)
        unsigned = (codes.to(torch.int16) + _ZERO).to(torch.uint8)
        if self._halves:  # split codes into 7 bits and 1, for which sums of two products fit 16 bits
            product = self._multiply(unsigned >> 1, _ZERO // 2).mul_(2).add_(self._multiply(unsigned & 1, 0))
        else:
            product = self._multiply(unsigned, _ZERO)
        product = product.mul_(scales[:, None])
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)

    def _multiply(self, x: Tensor, zero: int) -> Tensor:
        """Return ``x - zero`` times the weights in float32, where x is uint8."""
        return _multiply(x, zero, self._weight, self._scales, self._zero_points)


def _multiply(x: Tensor, zero: int, weight: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero, weight, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _saturates() -> bool:
    """Return whether oneDNN's product of the largest codes is wrong on this machine.

    x86 processors without VNNI instructions add pairs of products in 16 bits, which 2 * 255 * 127 exceeds.
    """
    size = 64
    weight = torch.ops.onednn.qlinear_prepack(torch.full((size, size), 127, dtype=torch.int8), None)
    ones, zeros = torch.ones(size, dtype=torch.float32), torch.zeros(size, dtype=torch.int64)
    product = _multiply(torch.full((1, size), 255, dtype=torch.uint8), _ZERO, weight, ones, zeros)
    return not bool((product == size * 127 * 127).all())
