"""Which form each matrix of a model takes: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.gguf_blocks import BlockMatrix, tensor_type_of
from paged_sdk.kernels.native.hadamard import hadamard_from_blocks, hadamard_from_packed
from paged_sdk.kernels.native.library import NativeLibrary, Workspace
from paged_sdk.kernels.native.packed import PACKED_TYPES, pack_gguf
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.triton_blocks import TRITON_BLOCK_FORMATS
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear
from paged_sdk.quant.native_block_experts import NativeBlockExperts

__all__ = ["DENSE", "FEW_ROWS", "LinearPolicy"]

FEW_ROWS = 12
"""Up to here packed weights are faster: fewer bytes come from memory. Beyond, int8 arithmetic on a form of its own
decides: on a 1.5B model 8 rows take 29 ms packed and 35 in int8, 12 take 42 and 38, 16 take 44 and 34."""

NARROW_BLOCK = 32
WIDE_BLOCK = 256
"""Elements of a row that share a block: in the legacy formats, and in the K formats."""

_CPU: Final = torch.device("cpu")

_ROWS_AT_ONCE: Final = 1024  # that are decoded at once


@frozen(kw_only=True)
class LinearPolicy:
    """Chooses forms.

    :ivar keep_blocks: matrices that a checkpoint stores in blocks stay quantized; False: every matrix is decoded
    :ivar device: where the weights are to be; kept blocks need the CPU, or CUDA with Triton
    :ivar workspace: of the native kernels; None: they are absent, and torch's own int8 product serves every row count
    :ivar isq: quantize every matrix to this, whatever it is stored as; needs the workspace
    :ivar one_form: packed weights for every row count: a third to half of the memory, and a text that does not depend
        on its batch
    """

    keep_blocks: bool = False
    device: torch.device = _CPU
    workspace: Workspace | None = None
    isq: IsqType | None = None
    one_form: bool = False

    def in_situ(self, weight: Tensor, *, is_head: bool) -> BlockMatrix | None:
        """A matrix quantized as ``isq`` says; None: nothing is to be quantized, or its rows fit no format's blocks.

        :param weight: ``[rows, columns]`` float32
        :param is_head: the output projection, which keeps more bits
        """
        if self.isq is None or weight.shape[1] % NARROW_BLOCK:
            return None
        assert self.workspace is not None
        isq = self.isq.for_head if is_head else self.isq
        if weight.shape[1] % WIDE_BLOCK:
            isq = isq.for_narrow_rows
        tensor_type = tensor_type_of(isq.gguf_name)
        return BlockMatrix(tensor_type, quantize_blocks(self.workspace.library, weight, tensor_type))

    def quantized(
        self, matrices: Sequence[BlockMatrix | None], biases: Sequence[Tensor | None], *, is_head: bool
    ) -> Linear | None:
        """A quantized layer of matrices that share an input; None: they are to be decoded.

        :param matrices: in blocks; None: dense
        :param is_head: the output projection: one form, since a step asks for a row per sequence and not per token
        """
        blocks = [matrix for matrix in matrices if matrix is not None]
        if len(blocks) < len(matrices):
            return None
        if self.device.type != "cpu":
            return self._repacked(blocks, biases)
        if self.workspace is None:
            return HadamardInt8Linear(blocks, biases)
        library = self.workspace.library
        if any(matrix.tensor_type not in PACKED_TYPES for matrix in blocks):
            rotated = [hadamard_from_blocks(library, matrix) for matrix in blocks]
            return NativeBlockLinear(self.workspace, rotated, biases, few_rows=FEW_ROWS)
        packed = [pack_gguf(library, each.blocks, each.tensor_type, *each.shape) for each in blocks]
        many_rows = None if self.one_form or is_head else [hadamard_from_packed(library, weight) for weight in packed]
        return NativeBlockLinear(self.workspace, packed, biases, many_rows=many_rows, few_rows=FEW_ROWS)

    def experts(self, gate: BlockMatrix, up: BlockMatrix, down: BlockMatrix, *, num_experts: int) -> Experts | None:
        """Quantized experts; None: they are to be decoded.

        :param gate: of all experts, one below the other; ``up`` and ``down`` likewise
        """
        if self.device.type != "cpu":
            if any(matrix.tensor_type not in TRITON_BLOCK_FORMATS for matrix in (gate, up, down)):
                return None
            from paged_sdk.quant.triton_block_experts import TritonBlockExperts

            return TritonBlockExperts(gate, up, down, num_experts=num_experts, device=self.device)
        if self.workspace is None:
            return None
        library = self.workspace.library
        packed = [
            pack_gguf(library, each.blocks, each.tensor_type, *each.shape)
            for each in (_packable(library, matrix) for matrix in (gate, up, down))
        ]
        return NativeBlockExperts(self.workspace, *packed, num_experts=num_experts)

    def _repacked(self, matrices: Sequence[BlockMatrix], biases: Sequence[Tensor | None]) -> Linear | None:
        if any(matrix.tensor_type not in TRITON_BLOCK_FORMATS for matrix in matrices):
            return None
        from paged_sdk.quant.triton_block import TritonBlockLinear

        return TritonBlockLinear(matrices, biases, device=self.device)


def _packable(library: NativeLibrary, matrix: BlockMatrix) -> BlockMatrix:
    """The matrix; of a type that cannot be packed, its weights in Q8_0: int8 with a scale for every 32 of them."""
    if matrix.tensor_type in PACKED_TYPES:
        return matrix
    target = tensor_type_of("Q8_0")
    parts = [BlockMatrix(matrix.tensor_type, rows) for rows in torch.split(matrix.blocks, _ROWS_AT_ONCE)]
    return BlockMatrix(target, torch.cat([quantize_blocks(library, part.decoded(), target) for part in parts]))


DENSE = LinearPolicy()
"""Every matrix in the model's dtype."""
