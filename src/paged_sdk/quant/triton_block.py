"""Multiply GGUF blocks, repacked for GPUs at the file's own bits per weight, by Triton kernels. Import this module only
where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix, concatenate
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.triton.quantized_linear import quantized_linear, quantized_swiglu
from paged_sdk.kernels.triton.tile_choices import MAX_FEW_ROWS
from paged_sdk.quant.linear import DecodedRows, Linear, concatenated_biases

__all__ = ["TritonBlockLinear"]

_WEIGHTS_AT_ONCE: Final = 1 << 22  # decoded at a time: tens of MiB, since KV blocks fill the device memory


class TritonBlockLinear(Linear):
    """Multiplies matrices that share an input, and concatenates their outputs. Adjacent matrices of one type take one
    launch.

    :param matrices: in the order of their outputs, each of a type in
        :data:`~paged_sdk.kernels.quantized.repack.REPACKABLE_TYPES`; the memory of a matrix that is
        already repacked is shared
    :param biases: one per matrix, in the model's dtype, or None
    :param device: the device for the weights
    """

    def __init__(
        self,
        matrices: Sequence[BlockMatrix | TritonBlockMatrix],
        biases: Sequence[Tensor | None],
        *,
        device: torch.device,
    ) -> None:
        self._weights: list[TritonBlockMatrix] = []
        self._biases: list[Tensor | None] = []
        for _, pairs in groupby(zip(matrices, biases, strict=True), lambda pair: pair[0].tensor_type):
            own_matrices, own_biases = zip(*pairs, strict=True)
            repacked = [_repacked(matrix, device) for matrix in own_matrices]
            self._weights.append(concatenate(repacked))
            self._biases.append(concatenated_biases(own_biases, [matrix.rows for matrix in repacked]))
        super().__init__(
            in_features=self._weights[0].cols,
            out_features=sum(weight.rows for weight in self._weights),
            num_bytes=sum(weight.num_bytes for weight in self._weights)
            + sum(bias.nbytes for bias in self._biases if bias is not None),
        )
        self._gate_up = self._as_gate_and_up()

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`, in float32, float16 or bfloat16."""
        outputs = [quantized_linear(x, weight, bias) for weight, bias in zip(self._weights, self._biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def forward_gated(self, x: Tensor, activation: KernelActivation, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward_gated`. Few rows take one launch."""
        # For more rows, no kernel fuses gate and up, except as one product if they have one type.
        is_one_product = len(self._weights) == 1 and len(x) > MAX_FEW_ROWS
        if self._gate_up is None or is_one_product:
            return super().forward_gated(x, activation, ctx)
        return quantized_swiglu(x, *self._gate_up, activation)

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`: yield the values of the blocks."""
        before = 0
        for weight, bias in zip(self._weights, self._biases, strict=True):
            step = max(1, _WEIGHTS_AT_ONCE // weight.cols)
            for first in range(0, weight.rows, step):
                rows = slice(first, min(first + step, weight.rows))
                values = weight.at(rows).decoded()
                own = values.new_zeros(len(values)) if bias is None else bias[rows].float()
                yield DecodedRows(before + first, values, own)
            before += weight.rows

    def _as_gate_and_up(self) -> tuple[TritonBlockMatrix, TritonBlockMatrix] | None:
        """Return the gate and up halves of the rows, which share the weights' memory; None if types change within a
        half, or if there are biases, which the fused kernel does not add.
        """
        if any(bias is not None for bias in self._biases):
            return None
        match self._weights:
            case [whole] if whole.rows % 2 == 0:
                half = whole.rows // 2
                return whole.at(slice(half)), whole.at(slice(half, None))
            case [gate, up] if gate.rows == up.rows:
                return gate, up
            case _:
                return None


def _repacked(matrix: BlockMatrix | TritonBlockMatrix, device: torch.device) -> TritonBlockMatrix:
    if isinstance(matrix, TritonBlockMatrix):
        return matrix.to(device)
    return repack(BlockMatrix(matrix.tensor_type, matrix.blocks.to(device)))
