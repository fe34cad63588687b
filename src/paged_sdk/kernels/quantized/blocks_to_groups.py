"""Presents GGUF blocks whose codes index a table as grouped matrices, so that they are multiplied at their own bits.

Values are unchanged. The codes of IQ4_NL, IQ4_XS, MXFP4 and NVFP4 index 16 levels, those of TQ1_0, TQ2_0 and Q1_0
evenly spaced levels.
"""

from __future__ import annotations

import torch

from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, block_format
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix, UnreadGroupedMatrix

__all__ = ["as_groups"]


def as_groups(matrix: BlockMatrix) -> UnreadGroupedMatrix | None:
    """Return the matrix in groups, unpacking codes when rows are read, or None if the type's codes index no table."""
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
