"""Multiply with one quantized matrix several times, for a profiler: `python -m benchmarks.gpu.one_product [--rows 1]`.

To read the kernel's hardware counters with Nsight Compute:

    ncu --clock-control none --set full --launch-skip 4 --launch-count 2 -k 'regex:_kernel' \
        python -m benchmarks.gpu.one_product
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.gpu.quantized_linear import copies_of, random_matrix
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized_linear import quantized_linear

__all__ = ["multiply"]


def multiply(name: str, num_rows: int, shape: Sequence[int], device: torch.device) -> None:
    """Multiply rows of activations with copies of a random matrix, enough that none is in the cache.

    :param name: type of the matrix, such as Q4_K
    :param num_rows: rows of activations
    :param shape: rows and columns of the matrix
    """
    height, width = shape
    x = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    for matrix in copies_of(random_matrix(tensor_type_of(name), height, width, device)):
        quantized_linear(x, matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description="One quantized product, for a profiler")
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--rows", type=int, default=1, help="of activations")
    parser.add_argument("--shape", type=int, nargs=2, default=(14_336, 4096), metavar=("HEIGHT", "WIDTH"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    multiply(arguments.type, arguments.rows, arguments.shape, torch.device("cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
