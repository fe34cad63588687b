"""Adds low-rank updates to the outputs of a linear layer, with each row's adapter looked up in a table of addresses.

Launch arguments are the same for every step, so launches can be recorded in CUDA graphs; adapters are added and removed
by changing the table. One pair of kernels serves all matrices of a layer.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.lora_table import TableField

__all__ = ["RANK_TILE", "add_lora_by_slot_"]

RANK_TILE: Final = 16
_COLUMNS: Final = 256  # input columns that a program reads at a time
_OUTPUTS: Final = 128
_FIELDS: tl.constexpr = tl.constexpr(len(TableField))
_DOWN: tl.constexpr = tl.constexpr(int(TableField.DOWN))
_UP: tl.constexpr = tl.constexpr(int(TableField.UP))
_GAINS: tl.constexpr = tl.constexpr(int(TableField.GAINS))
_RANK: tl.constexpr = tl.constexpr(int(TableField.RANK))


def add_lora_by_slot_(
    out: Tensor, x: Tensor, slots: Tensor, table: Tensor, starts: Tensor, shrunk: Tensor, *, widest: int
) -> None:
    """Add each row's adapter update to a linear layer's outputs; see :func:`paged_sdk.kernels.lora.add_lora_`.

    :param out: ``[num_rows, out_features]``, with adjacent columns; changed in place
    :param x: ``[num_rows, in_features]`` of the dtype of the updates, with adjacent columns
    :param slots: ``[num_rows]`` int64: each row's slot in the table; -1: no adapter
    :param table: ``[num_slots, num_matrices, 4]`` int64: see :class:`~paged_sdk.kernels.lora_table.TableField`
    :param starts: ``[num_matrices + 1]`` int32: the first output of each matrix, and the end
    :param shrunk: ``[num_rows, num_matrices, ranks]`` float32 scratch; ``ranks`` is the largest rank, a multiple of
        :data:`RANK_TILE`
    :param widest: the number of outputs of the widest matrix
    """
    num_rows, (num_matrices, ranks) = len(x), shrunk.shape[1:]
    grid = (num_rows, num_matrices, ranks // RANK_TILE)
    _shrink[grid](
        x, slots, table, shrunk, x.stride(0), table.stride(0), x.shape[1], num_matrices, ranks,
        tile=RANK_TILE, block=_COLUMNS, num_warps=4,
    )  # fmt: skip
    _expand[(num_rows, num_matrices, triton.cdiv(widest, _OUTPUTS))](
        out, slots, table, starts, shrunk, out.stride(0), table.stride(0), num_matrices, ranks, x,
        tile=RANK_TILE, block=_OUTPUTS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _shrink(
    x_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    in_features: tl.tensor,
    num_matrices: tl.tensor,
    ranks: tl.tensor,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Multiply a row of ``x`` by a tile of ranks of the down matrix."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        entry = table_ptr + slot * slot_stride + matrix * _FIELDS
        rank = tl.load(entry + _RANK)
        first = tl.program_id(2) * tile
        if first < rank:
            down = tl.load(entry + _DOWN).to(x_ptr.dtype)
            own = first + tl.arange(0, tile)
            total = tl.zeros([tile], dtype=tl.float32)
            for start in range(0, in_features, block):
                column = start + tl.arange(0, block)
                inside = column < in_features
                inputs = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
                weights = tl.load(
                    down + own[:, None] * in_features + column[None, :],
                    mask=(own < rank)[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                total += tl.sum(weights * inputs[None, :], 1)
            tl.store(shrunk_ptr + (row * num_matrices + matrix) * ranks + own, total)


@triton.jit
def _expand(
    out_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_matrices: tl.tensor,
    ranks: tl.tensor,
    like_ptr: tl.tensor,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Multiply a row's ranks by a block of outputs of the up matrix, and add the result to the outputs."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        entry = table_ptr + slot * slot_stride + matrix * _FIELDS
        rank = tl.load(entry + _RANK)
        begin, end = tl.load(starts_ptr + matrix), tl.load(starts_ptr + matrix + 1)
        output = tl.program_id(2) * block + tl.arange(0, block)
        inside = output < end - begin
        if (rank > 0) & (tl.program_id(2) * block < end - begin):
            up = tl.load(entry + _UP).to(like_ptr.dtype)
            total = tl.zeros([block], dtype=tl.float32)
            for first in range(0, rank, tile):
                own = first + tl.arange(0, tile)
                inputs = tl.load(shrunk_ptr + (row * num_matrices + matrix) * ranks + own, mask=own < rank, other=0.0)
                weights = tl.load(
                    up + own[:, None] * (end - begin) + output[None, :],
                    mask=(own < rank)[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                total += tl.sum(weights * inputs[:, None], 0)
            place = out_ptr + row * out_stride + begin + output
            before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            gains = tl.load(entry + _GAINS)
            if gains != 0:
                factors = gains.to(shrunk_ptr.dtype) + output
                before = before * tl.load(factors, mask=inside, other=1.0)
                before += tl.load(factors + (end - begin), mask=inside, other=0.0)
            tl.store(place, (before + total).to(out_ptr.dtype.element_ty), mask=inside)
