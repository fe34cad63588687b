"""Decode a checkpoint's tensors and quantize them for a GGUF file, piece by piece, several pieces in parallel.

Each piece is encoded on a thread of a pool, on which torch uses no further threads: torch's threads spin while they
wait. Beside seven busy programs on two CPUs, SmolLM2-135M took 37 s with them and takes 5 s without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.native.library import load
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantized.gguf_blocks import block_format
from paged_sdk.kernels.quantized.quantize import quantize_blocks_reference
from paged_sdk.kernels.quantized.quantize_tables import TABLE_TYPES, quantize_table_blocks
from paged_sdk.kernels.torch_threads import use_threads
from paged_sdk.system.processors import usable_processors
from paged_sdk.weights.gguf.export_matrix import GgufMatrix
from paged_sdk.weights.gguf.mixtures import PLAIN_TYPES

__all__ = ["TensorEncoder", "tensor_encoder"]

_ELEMENTS_AT_ONCE: Final = 1 << 18  # 1 MiB of float32: large enough that the overhead of a call does not matter
_MOST_THREADS: Final = 16  # a single thread writes their results
_LARGEST_F16: Final = 65504.0

_Bytes = npt.NDArray[np.uint8]


class TensorEncoder:
    """Encodes tensors as bytes; made by :func:`tensor_encoder`.

    :param pool: the threads that encode
    :param num_threads: number of threads of the pool
    """

    def __init__(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        self._pool = pool
        self._ahead = 2 * num_threads
        self._library = load()

    def encoded(
        self, name: str, tensor_type: int, matrix: GgufMatrix, importance: Tensor | None = None
    ) -> Iterator[_Bytes]:
        """Yield a tensor's bytes in order. At most twice as many pieces as threads are encoded ahead.

        :param tensor_type: ggml's number of the type
        :param importance: float32 ``[matrices, columns]``: weights of errors by column; None: unweighted
        :raises CheckpointError: a value does not fit the type
        """
        pending: deque[Future[_Bytes]] = deque()
        cols = matrix.matrices[0].shape[1]
        try:
            for number, decode in matrix.pieces(max(1, _ELEMENTS_AT_ONCE // max(1, cols))):
                weights = None if importance is None else importance[number]
                pending.append(self._pool.submit(self._piece, tensor_type, decode, weights))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except CheckpointError as error:
            raise CheckpointError(f"tensor {shown(name)}: {error}") from error
        finally:
            for each in pending:
                each.cancel()

    def _piece(self, tensor_type: int, decode: Callable[[], Tensor], importance: Tensor | None) -> _Bytes:
        values, form = decode().contiguous(), block_format(tensor_type).name
        if form in PLAIN_TYPES:
            encoded = _plain(values, form)
        elif tensor_type in TABLE_TYPES:
            encoded = quantize_table_blocks(values, tensor_type, importance)
        elif self._library is None:
            encoded = quantize_blocks_reference(values, tensor_type, importance)
        else:
            encoded = quantize_blocks(self._library, values, tensor_type, importance=importance, num_threads=1)
        return encoded.numpy().reshape(-1)


@contextmanager
def tensor_encoder() -> Iterator[TensorEncoder]:
    """Return an encoder whose threads end with the block."""
    threads = min(usable_processors(), _MOST_THREADS)
    with ThreadPoolExecutor(
        threads, thread_name_prefix="paged-sdk encode", initializer=use_threads, initargs=(1,)
    ) as pool:
        yield TensorEncoder(pool, threads)


def _plain(values: Tensor, form: str) -> Tensor:
    match form:
        case "F32":
            return values.view(torch.uint8)
        case "F16":
            if not bool((values.abs() <= _LARGEST_F16).all()):
                raise CheckpointError("it cannot be F16: it holds NaN, Inf or numbers above 65,504")
            return values.half().view(torch.uint8)
        case _:
            return values.bfloat16().view(torch.uint8)
