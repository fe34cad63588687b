"""Quantize with ggml's functions, of the installed peer llama_cpp and without an importance matrix, for comparison."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environments import installed_engines, python_of
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, block_format

__all__ = ["GgmlQuantizer", "find_ggml_quantizer"]

_PEER = "llama_cpp"


class GgmlQuantizer:
    """Calls ``ggml_quantize_chunk`` of a library.

    :param path: the shared library
    """

    def __init__(self, path: Path) -> None:
        self._quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        self._quantize.restype = ctypes.c_size_t

    def quantized(self, values: Tensor, tensor_type: int) -> BlockMatrix:
        """Return a matrix in blocks of one of ggml's types.

        :param values: float32 ``[rows, cols]``, contiguous; ``cols`` is a multiple of the type's block
        """
        rows, cols = values.shape
        form = block_format(tensor_type)
        blocks = torch.empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
        written = self._quantize(tensor_type, values.data_ptr(), blocks.data_ptr(), 0, rows, cols, None)
        assert written == blocks.numel(), (written, blocks.numel())
        return BlockMatrix(tensor_type, blocks)


def find_ggml_quantizer() -> GgmlQuantizer | None:
    """Return the quantizer of the peer's library; None: the peer is not installed."""
    if _PEER not in installed_engines():
        return None
    libraries = sorted(python_of(_PEER).parents[1].glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.*"))
    return GgmlQuantizer(libraries[0]) if libraries else None
