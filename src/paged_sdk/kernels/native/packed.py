"""Weights in the native kernels' layout: panels of 16 rows, at the file's own bits per weight."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.gguf_blocks import block_format
from paged_sdk.kernels.native.library import NativeLibrary

__all__ = ["HADAMARD_INT8", "PACKED_TYPES", "PackedWeight", "pack_gguf"]

#: ggml's numbers of the tensor types that can be packed: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K
PACKED_TYPES = frozenset({2, 3, 6, 7, 8, 12, 13, 14})

#: the library's own number, of :mod:`paged_sdk.kernels.native.hadamard`
HADAMARD_INT8 = 256


@frozen(eq=False)
class PackedWeight:
    """A matrix [rows, cols] that the native kernels multiply with; it owns its memory.

    :ivar tensor_type: ggml's number of the block format, or :data:`HADAMARD_INT8`
    :ivar rows: output features
    :ivar cols: input features, a multiple of the format's block, of 32 where rotated
    :ivar data: uint8, in the layout of ``csrc/layout.h``, the same on every instruction set
    """

    tensor_type: int
    rows: int
    cols: int
    data: Tensor

    @property
    def format(self) -> str:
        """ggml's name of the block format, or ``Hadamard int8``."""
        return "Hadamard int8" if self.tensor_type == HADAMARD_INT8 else block_format(self.tensor_type).name

    @property
    def num_bytes(self) -> int:
        """Bytes held; rows are padded to a multiple of 16."""
        return self.data.numel()


def pack_gguf(
    library: NativeLibrary, raw: Tensor, tensor_type: int, rows: int, cols: int, *, num_threads: int | None = None
) -> PackedWeight:
    """Repack a GGUF tensor; no weight changes its value.

    :param raw: uint8 [rows, bytes of a row] (or flat), the file's blocks
    :param tensor_type: ggml's number of the type
    :param num_threads: torch's own number by default
    :raises UnsupportedQuantizationError: the type is not one of :data:`PACKED_TYPES`
    :raises CheckpointError: ``cols`` is no multiple of the format's block, or ``raw`` is not rows x cols elements
    """
    form = block_format(tensor_type)
    if tensor_type not in PACKED_TYPES:
        supported = tuple(block_format(number).name for number in sorted(PACKED_TYPES))
        raise UnsupportedQuantizationError(
            f"{form.name} weights cannot be packed for the native kernels: supported are {', '.join(supported)}",
            quantization=form.name,
            supported=supported,
        )
    if rows < 1 or cols < 1 or cols % form.elements:
        raise CheckpointError(
            f"a {form.name} tensor of {rows} x {cols} cannot be: its rows are blocks of {form.elements} elements"
        )
    expected = rows * (cols // form.elements) * form.num_bytes
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        raise CheckpointError(
            f"a {form.name} tensor of {rows} x {cols} has {expected} bytes: got {raw.numel()} elements of {raw.dtype}"
        )
    raw = raw.contiguous()
    functions = library.functions
    data = torch.empty(functions.paged_packed_bytes(tensor_type, rows, cols), dtype=torch.uint8)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    functions.paged_pack(tensor_type, raw.data_ptr(), rows, cols, data.data_ptr(), threads)
    return PackedWeight(tensor_type=tensor_type, rows=rows, cols=cols, data=data)
