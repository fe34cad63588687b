"""Shows GGUF's blocks whose codes name entries of a table as grouped matrices, multiplied at their own bits.

The numbers are the same: IQ4_NL's, IQ4_XS's, MXFP4's and NVFP4's codes name levels of four bits, TQ1_0's, TQ2_0's and
Q1_0's levels at equal distances.
"""

from __future__ import annotations

import torch

from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, block_format
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix

__all__ = ["as_groups"]


def as_groups(matrix: BlockMatrix) -> UnreadGroupedMatrix | None:
    """Return a matrix in groups, whose codes are unpacked when rows are asked for; None: its type has no table."""
    form, shape = block_format(matrix.tensor_type), matrix.shape
    table = form.table
    if table is None:
        return None
    group_size, bits = table.group_size, (len(table.levels) - 1).bit_length()
    levels = torch.tensor(table.levels, dtype=torch.float32)

    def read(first: int, last: int) -> GroupedMatrix:
        blocks = matrix.rows(slice(first, last)).blocks.reshape(-1, form.num_bytes)
        return GroupedMatrix(
            codes=table.codes(blocks).view(last - first, shape[1]),
            scales=table.scales(blocks).reshape(last - first, -1),
            group_size=group_size,
            levels=levels.to(blocks.device),
            bits=bits,
        )

    return UnreadGroupedMatrix(
        shape=shape, read=read, group_size=group_size, has_minima=False, bits=bits, levels=levels
    )
