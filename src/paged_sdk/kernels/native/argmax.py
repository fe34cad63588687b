"""Computes the argmax of each row of logits in one native call."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.linear import check_matrix, undefined
from paged_sdk.kernels.native.structures_sampling import Argmax

__all__ = ["likeliest_tokens"]


def likeliest_tokens(library: NativeLibrary, logits: Tensor, *, num_threads: int | None = None) -> Tensor:
    """Return the column of each row's largest number; the lowest if several are equal.

    :param logits: float32 ``[num_rows, vocab_size]``; rows contiguous
    :param num_threads: torch's own number by default
    :returns: int64 ``[num_rows]``, -1 where a number is NaN or the largest is not finite
    :raises ConfigError: shape, dtype or strides do not fit
    """
    num_rows, vocab_size = logits.shape
    check_matrix("logits", logits, (num_rows, vocab_size), (torch.float32,))
    out = undefined((num_rows,), np.int64)
    args = Argmax(
        x=logits.data_ptr(),
        out=out.data_ptr(),
        x_stride=logits.stride(0),
        rows=num_rows,
        cols=vocab_size,
        num_threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    library.functions.paged_argmax(library.level, byref(args))
    return out
