"""Multiplies heads with packed matrices of their own, those of a layer in one native call.

The arithmetic is that of :mod:`paged_sdk.kernels.native.linear`, so a row's result does not depend on the number of
rows or threads.
"""

from __future__ import annotations

from ctypes import byref

from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NATIVE_FLOATS, describe
from paged_sdk.kernels.native.packed import PANEL_ROWS, PackedWeight
from paged_sdk.kernels.native.structures import DTYPES, HeadProduct

__all__ = ["NativeHeads"]


class NativeHeads:
    """Multiplies each head of a row with the head's own matrix, or a row with the matrices of several heads.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param weight: packed ``[num_heads * size, cols]``: the heads' matrices, concatenated by rows; ``size`` is a
        multiple of 16
    :raises ConfigError: the heads' rows do not fit, or the columns have an order of their own
    """

    def __init__(self, workspace: Workspace, weight: PackedWeight, *, num_heads: int) -> None:
        if num_heads < 1 or weight.rows % (num_heads * PANEL_ROWS):
            raise ConfigError.of("weight.rows", weight.rows, f"{num_heads} times a multiple of {PANEL_ROWS}")
        if weight.order is not None:
            raise ConfigError.of("weight", "columns in an order of their own", "columns in the order of the input")
        self.num_heads: int = num_heads
        self.size: int = weight.rows // num_heads
        self.cols: int = weight.cols
        self._workspace = workspace
        self.weight: PackedWeight = weight
        self._args = HeadProduct(workspace=workspace.handle, num_threads=workspace.num_threads)
        describe(self._args.weight, weight, None)

    def __call__(self, x: Tensor, out: Tensor, *, first: int = 0) -> Tensor:
        """Compute ``out[:, i] = W_(first + i) x[:, i]`` for each head ``i`` of ``out``.

        :param x: ``[num_rows, n, cols]`` float32, bfloat16 or float16, elements of a head adjacent; ``n`` is the number
            of heads of ``out``, or 1: all heads have the same rows
        :param out: ``[num_rows, n, size]`` of the same dtype, likewise, not overlapping ``x``; may be a view
        :param first: the first head
        :returns: ``out``
        :raises ConfigError: shapes, dtypes or strides do not fit, or a head does not exist
        """
        num_rows, count, _ = out.shape
        if not 0 <= first < first + count <= self.num_heads:
            raise ConfigError.of("heads", f"{first} to {first + count - 1}", f"0 to {self.num_heads - 1}")
        for name, heads, shapes in (
            ("x", x, [(num_rows, count, self.cols), (num_rows, 1, self.cols)]),
            ("out", out, [(num_rows, count, self.size)]),
        ):
            if tuple(heads.shape) not in shapes:
                raise ConfigError.of(f"{name}.shape", tuple(heads.shape), " or ".join(map(str, shapes)))
            if heads.dtype != x.dtype or heads.dtype not in NATIVE_FLOATS or heads.device.type != "cpu":
                due = "float32, bfloat16 or float16 in CPU memory, the same for both"
                raise ConfigError.of(f"{name}.dtype", f"{heads.dtype} on {heads.device.type}", due)
            if heads.stride(2) != 1:
                raise ConfigError.of(f"{name}.stride()", heads.stride(), "adjacent elements of a head")
        args, library = self._args, self._workspace.library
        weight = self.weight
        args.weight.data = weight.data.data_ptr() + first * (weight.num_bytes // self.num_heads)
        args.weight.rows = count * self.size
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        args.x_head_stride = 0 if x.shape[1] < count else x.stride(1)
        args.out, args.out_stride, args.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
        args.num_heads, args.num_rows, args.dtype = count, num_rows, DTYPES[x.dtype]
        if num_rows and library.functions.paged_head_product(library.level, byref(args)):
            raise MemoryError("no memory for the scratch of native heads")
        return out
