"""Time linear layers with quantized weights on CUDA: `python -m benchmarks.gpu.quantized_linear [--sweep]`.

Weights stream from memory: a call multiplies with copies of a matrix one after the other, several times what the cache
holds, in one CUDA graph. GB/s count the bytes of the repacked matrix, beside a copy on the device and torch's product
of bfloat16 in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import Row, copy_bandwidth, microseconds
from paged_sdk.kernels.gguf_blocks import block_format, tensor_type_of
from paged_sdk.kernels.quantized_linear import quantized_linear, quantized_swiglu
from paged_sdk.kernels.triton.quantized_few_rows import FewRowsPlan, linear_few_rows
from paged_sdk.kernels.triton.quantized_tiles import TilePlan, linear_by_tiles
from paged_sdk.kernels.triton_blocks import TRITON_BLOCK_FORMATS, TritonBlockMatrix

__all__ = ["run", "sweep"]

# Rows and columns of the matrix.
SHAPES: Final = ((4096, 4096), (14_336, 4096), (4096, 14_336), (1536, 8960))
NUM_ROWS: Final = (1, 2, 4, 8, 16, 64, 256, 1024)
STREAMED_BYTES: Final = 256 << 20
MAX_COPIES: Final = 24
HALF: Final = 0x2000  # the float16 number 2**-7


def random_matrix(tensor_type: int, rows: int, cols: int, device: torch.device) -> TritonBlockMatrix:
    """Make random codes, and scales that are finite."""
    form = TRITON_BLOCK_FORMATS[tensor_type]
    chunks = cols // 64

    def words(width: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (rows, width), dtype=torch.int32, device=device)

    def halves(width: int) -> Tensor:
        return torch.full((rows, width), HALF << 16 | HALF, dtype=torch.int32, device=device)

    supers = halves(chunks // 4) if form.has_supers else None
    high: Tensor | None = None
    if form.bits == 5:
        high = torch.randint(0, 256, (rows, chunks * form.words), dtype=torch.uint8, device=device)
    elif form.bits == 6:
        high = torch.randint(-(1 << 15), 1 << 15, (rows, chunks * form.words), dtype=torch.int16, device=device)
        supers = torch.full((rows, chunks // 4), 2**-7, dtype=torch.float16, device=device)
    return TritonBlockMatrix(
        tensor_type=tensor_type,
        cols=cols,
        quants=words(chunks * form.words),
        high=high,
        scales=words(chunks) if form.has_supers else halves(chunks),
        minima=halves(chunks) if form.has_minima and not form.has_supers else None,
        supers=supers,
    )


def copies_of(matrix: TritonBlockMatrix) -> list[TritonBlockMatrix]:
    """Make so many copies that none is still in the cache when its turn comes again."""
    number = max(2, min(MAX_COPIES, STREAMED_BYTES // matrix.num_bytes)) // 2 * 2
    rows, cols = matrix.rows, matrix.cols
    return [random_matrix(matrix.tensor_type, rows, cols, matrix.quants.device) for _ in range(number)]


def time_each(call: Callable[[TritonBlockMatrix], Tensor], matrices: Sequence[TritonBlockMatrix]) -> float:
    """Return the microseconds per matrix."""
    return microseconds(lambda: [call(matrix) for matrix in matrices]) / len(matrices)


def describe(kernel: str, matrix: TritonBlockMatrix, num_rows: int, us: float, reference: Row) -> Row:
    return {
        "kernel": kernel,
        "case": f"{block_format(matrix.tensor_type).name} {matrix.rows} x {matrix.cols}, {num_rows} rows, bfloat16",
        "us": us,
        "gbps": matrix.num_bytes / us / 1000,
        "tflops": 2 * num_rows * matrix.rows * matrix.cols / us / 1e6,
        "reference": reference,
    }


def dense_times(rows: int, cols: int, device: torch.device) -> dict[int, float]:
    """Return the microseconds of torch's product of bfloat16, by number of rows of activations."""
    number = max(2, min(MAX_COPIES, STREAMED_BYTES // (2 * rows * cols)))
    weights = [torch.randn(rows, cols, dtype=torch.bfloat16, device=device) for _ in range(number)]
    times = {}
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, cols, dtype=torch.bfloat16, device=device)
        times[num_rows] = microseconds(partial(_multiply_dense, x, weights)) / number
    return times


def _multiply_dense(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def _gate_and_up(x: Tensor, matrices: Sequence[TritonBlockMatrix]) -> None:
    for gate, up in zip(matrices[0::2], matrices[1::2], strict=True):
        quantized_swiglu(x, gate, up)


def _few_rows(x: Tensor, plan: FewRowsPlan, matrix: TritonBlockMatrix) -> Tensor:
    return linear_few_rows(x, matrix, None, plan)


def _tiles(x: Tensor, plan: TilePlan, matrix: TritonBlockMatrix) -> Tensor:
    return linear_by_tiles(x, matrix, None, plan)


def run(device: torch.device) -> Iterator[Row]:
    """Time every type with one row, Q4_K and Q6_K with more, and Q4_K's gate, up and activation in one kernel.

    :param device: a CUDA device
    :returns: per case microseconds, GB/s of the repacked matrix and TFLOP/s; under ``reference`` the device's copy in
        GB/s and torch's microseconds with bfloat16 weights
    """
    copied = copy_bandwidth(device)
    often = [tensor_type_of(name) for name in ("Q4_K", "Q6_K")]
    for height, width in SHAPES:
        dense = dense_times(height, width, device)
        for tensor_type in TRITON_BLOCK_FORMATS:
            matrices = copies_of(random_matrix(tensor_type, height, width, device))
            for num_rows in NUM_ROWS if tensor_type in often else NUM_ROWS[:1]:
                x = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
                us = time_each(partial(quantized_linear, x), matrices)
                reference = {"copy_gbps": copied, "torch_bf16_us": dense[num_rows]}
                yield describe("quantized_linear", matrices[0], num_rows, us, reference)
            if tensor_type == often[0] and height > width:
                x = torch.randn(1, width, dtype=torch.bfloat16, device=device)
                us = microseconds(partial(_gate_and_up, x, matrices)) / len(matrices)
                yield describe("quantized_swiglu, per matrix", matrices[0], 1, us, {"copy_gbps": copied})


def sweep(device: torch.device) -> Iterator[Row]:
    """Time the ways to cut the products of decoding, to choose the plans by."""
    for name, (height, width) in product(("Q4_K", "Q6_K", "Q8_0"), SHAPES):
        matrices = copies_of(random_matrix(tensor_type_of(name), height, width, device))
        words = matrices[0].format.words
        for num_rows, block_n, num_warps in product((1, 4), (1, 2, 4, 8), (1, 2, 4)):
            x = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
            few = FewRowsPlan(block_n=block_n, block_c=num_warps * 128 // words, num_splits=1, num_warps=num_warps)
            us = time_each(partial(_few_rows, x, few), matrices)
            yield describe("few rows", matrices[0], num_rows, us, {"plan": str(few)})
        for num_rows, block_n, block_w, num_splits, num_stages in product(
            (8, 16), (64, 128), (16, 32), (1, 2, 4, 8), (2, 3, 4)
        ):
            x = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
            tiles = TilePlan(16, block_n, block_w, num_splits, num_warps=4, num_stages=num_stages)
            us = time_each(partial(_tiles, x, tiles), matrices)
            yield describe("tiles", matrices[0], num_rows, us, {"plan": str(tiles)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantized linear layers on a CUDA device")
    parser.add_argument("--sweep", action="store_true", help="time ways to cut the products instead")
    arguments = parser.parse_args()
    for row in (sweep if arguments.sweep else run)(torch.device("cuda")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
