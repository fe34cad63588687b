"""Time linear layers with quantized weights on CUDA: `python -m benchmarks.gpu.quantized_linear [--sweep]`.

Weights are read from memory: a CUDA graph multiplies with copies of a matrix, in total several times the cache's size.
GB/s count the bytes of the repacked matrix. References in the same run are a device copy and torch's product in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Final

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from benchmarks.gpu.ahead import compile_side_by_side
from benchmarks.gpu.timing import Row, copy_bandwidth, microseconds
from paged_sdk.kernels.quantized.gguf_blocks import block_format, tensor_type_of
from paged_sdk.kernels.quantized.triton_blocks import TRITON_BLOCK_FORMATS, TritonBlockMatrix
from paged_sdk.kernels.quantized_linear import quantized_linear, quantized_swiglu
from paged_sdk.kernels.triton.availability import launch_errors, num_multiprocessors
from paged_sdk.kernels.triton.quantized_few_rows import FewRowsPlan, linear_few_rows
from paged_sdk.kernels.triton.quantized_tiles import TilePlan, linear_by_tiles, plan_tiles
from paged_sdk.kernels.triton.tile_choices import TILE_CHOICES, MatrixUnits, TileChoice, matrix_units

__all__ = ["best_choices", "candidates", "run", "sweep"]

# Rows and columns of the matrices.
SHAPES: Final = ((4096, 4096), (14_336, 4096), (4096, 14_336), (1536, 8960))
SWEPT_TYPES: Final = ("Q4_K", "Q6_K")
NUM_ROWS: Final = (1, 2, 4, 8, 16, 64, 256, 1024)
STREAMED_BYTES: Final = 256 << 20
MAX_COPIES: Final = 24
HALF: Final = 0x2000  # the float16 number 2**-7


def random_matrix(tensor_type: int, rows: int, cols: int, device: torch.device) -> TritonBlockMatrix:
    """Make a matrix of random codes with finite scales."""
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
    """Make enough copies that none is still in the cache at its next turn."""
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
    """Return the microseconds of torch's product in bfloat16, by number of rows of activations."""
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


def _few_rows(plan: FewRowsPlan, x: Tensor, matrix: TritonBlockMatrix) -> Tensor:
    return linear_few_rows(x, matrix, None, plan)


def _tiles(plan: TilePlan, x: Tensor, matrix: TritonBlockMatrix) -> Tensor:
    return linear_by_tiles(x, matrix, None, plan)


def run(device: torch.device) -> Iterator[Row]:
    """Time every type with one row, Q4_K and Q6_K with more, and Q4_K's gate, up and activation in one kernel. The
    kernels of the first shape are compiled in parallel before; the other shapes need few others.

    :param device: a CUDA device
    :returns: per case: microseconds, GB/s of the repacked matrix, and TFLOP/s; under ``reference``, a device copy in
        GB/s, and torch's microseconds with bfloat16 weights
    """
    copied = copy_bandwidth(device)
    often = [tensor_type_of(name) for name in ("Q4_K", "Q6_K")]
    samples = {each: random_matrix(each, *SHAPES[0], device) for each in TRITON_BLOCK_FORMATS}
    compile_side_by_side(
        partial(quantized_linear, torch.randn(num_rows, SHAPES[0][1], dtype=torch.bfloat16, device=device), matrix)
        for tensor_type, matrix in samples.items()
        for num_rows in (NUM_ROWS if tensor_type in often else NUM_ROWS[:1])
    )
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


def candidates(units: MatrixUnits) -> Iterator[TileChoice]:
    """Yield tile choices for products with a number of rows of activations, those of the table first."""
    own = TILE_CHOICES[units]
    yield from own
    for choice in own:
        warps = (4, 8) if choice.block_m > 32 else (2, 4)
        more = (choice.programs, 2 * choice.programs)
        for block_n, num_warps, num_stages, programs in product((64, 128), warps, (2, 3, 4), more):
            other = evolve(choice, block_n=block_n, num_warps=num_warps, num_stages=num_stages, programs=programs)
            if other not in own:
                yield other


@frozen
class Swept:
    """Describes one tile choice for a product.

    :ivar choice: name of the choice
    :ivar num_rows: rows of activations
    """

    choice: str
    num_rows: int
    call: Callable[[Tensor, TritonBlockMatrix], Tensor]

    def activations(self, matrix: TritonBlockMatrix) -> Tensor:
        """Make random activations for a matrix."""
        return torch.randn(self.num_rows, matrix.cols, dtype=torch.bfloat16, device=matrix.quants.device)


def sweep(device: torch.device) -> Iterator[Row]:
    """Time all tile choices: for few rows of activations, sums by threads; and tiles of all sizes. The kernels of a
    type are compiled in parallel before it is timed.

    :returns: microseconds, or an error, for each matrix, number of rows of activations, and choice; and after each
        matrix, the fastest choice so far for each number of rows
    """
    multiprocessors = num_multiprocessors(device)
    found: list[Row] = []
    for name, (height, width) in product(SWEPT_TYPES, SHAPES):
        matrix = random_matrix(tensor_type_of(name), height, width, device)
        ways = list(_ways(matrix, candidates(matrix_units(device, torch.bfloat16)), multiprocessors))
        compile_side_by_side(partial(way.call, way.activations(matrix), matrix) for way in ways)
        matrices = copies_of(matrix)
        for way in ways:
            found.append(_timed(way, matrices))
            yield found[-1]
        for num_rows, choice in best_choices(found).items():
            yield {"kernel": "sweep so far", "case": f"{num_rows} rows: {choice}"}


def _ways(matrix: TritonBlockMatrix, choices: Iterable[TileChoice], multiprocessors: int) -> Iterator[Swept]:
    words = matrix.format.words
    for num_rows, block_n, num_warps in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        few = FewRowsPlan(block_n=block_n, block_c=num_warps * 128 // words, num_splits=1, num_warps=num_warps)
        yield Swept(str(few), num_rows, partial(_few_rows, few))
    for choice in choices:
        for num_rows in (1, 2, 4, 16) if choice.block_m == 16 else (choice.block_m,):
            plan = plan_tiles(matrix, num_rows, choice, multiprocessors)
            yield Swept(str(choice), num_rows, partial(_tiles, plan))


def _timed(way: Swept, matrices: Sequence[TritonBlockMatrix]) -> Row:
    matrix = matrices[0]
    case = f"{block_format(matrix.tensor_type).name} {matrix.rows} x {matrix.cols}"
    row = {"kernel": "sweep", "case": case, "rows": way.num_rows, "choice": way.choice}
    try:
        return row | {"us": time_each(partial(way.call, way.activations(matrix)), matrices)}
    except launch_errors() as error:
        return row | {"error": str(error)[:200]}


def best_choices(rows: Sequence[Row]) -> dict[int, str]:
    """Return the fastest choice for each number of rows, by the geometric mean of times over all matrices.

    Choices that failed with any matrix are left out.
    """
    times: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        found = times.setdefault(row["rows"], {}).setdefault(row["choice"], [])
        found.append(math.log(row["us"]) if "us" in row else math.inf)
    return {num_rows: min(found, key=lambda choice: sum(found[choice])) for num_rows, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantized linear layers on a CUDA device")
    parser.add_argument("--sweep", action="store_true", help="time ways to cut the products instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    for row in (sweep if arguments.sweep else run)(torch.device("cuda")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
