"""Draws tokens from rows of logits in one native call."""

from __future__ import annotations

from ctypes import byref
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary, Workspace
from paged_sdk.kernels.native.linear import check_matrix
from paged_sdk.kernels.native.structures_sampling import DRAW_SETTINGS, Draw

__all__ = ["NativeDraw"]

Ids: TypeAlias = npt.NDArray[np.int64]


class NativeDraw:
    """Draws tokens by temperature, top-k, top-p and min-p, in this order.

    With top-k or top-p, a draw inverts the cumulative distribution over the kept tokens in the order of falling logits,
    otherwise in the order of token ids. Of tokens that tie for the last place that top-k or top-p keeps, those with the
    lowest ids are kept. A draw depends on its own row alone.

    It is used by one call at a time.

    :param library: the loaded library
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._workspace = Workspace(library)

    def __call__(
        self,
        logits: Tensor,
        settings: npt.NDArray[np.void],
        num_draws: Ids,
        streams: Ids,
        positions: Ids,
        proposed: Ids | None = None,
        *,
        num_threads: int | None = None,
    ) -> Ids:
        """Draw any number of tokens from each row.

        :param logits: float32 ``[num_rows, vocab_size]``, vocab_size at least 1; rows contiguous
        :param settings: of each row, ``[num_rows]`` of :data:`~paged_sdk.kernels.native.structures_sampling
            .DRAW_SETTINGS`; the streams in them are not read. Temperature 0 takes the likeliest token
        :param num_draws: from each row, ``[num_rows]``
        :param streams: of the random numbers (see :func:`paged_sdk.kernels.sampling.uniforms`), ``[sum(num_draws)]``,
            row after row
        :param positions: in these streams, ``[sum(num_draws)]``
        :param proposed: tokens for each draw, ``[sum(num_draws), N]``: the first that is kept is taken instead of a
            drawn one; below 0: no token
        :param num_threads: torch's own number by default
        :returns: token ids, ``[sum(num_draws)]``, -1 where a logit of the row is NaN or the largest is not finite
        :raises ConfigError: shape, dtype or strides of the logits do not fit
        :raises MemoryError: there is no memory for 12 bytes per thread and token of the vocabulary
        """
        num_rows, vocab_size = logits.shape
        check_matrix("logits", logits, (num_rows, vocab_size), (torch.float32,))
        first_draws = np.zeros(num_rows + 1, np.int64)
        num_draws.cumsum(out=first_draws[1:])
        total = int(first_draws[-1])
        proposed = np.empty((total, 0), np.int64) if proposed is None else proposed
        assert settings.dtype == DRAW_SETTINGS, settings.dtype
        assert settings.shape == (num_rows,), settings.shape
        for each in (streams, positions, proposed):
            assert each.dtype == np.int64, each.dtype
            assert len(each) == total, (each.shape, total)
        arrays = [np.ascontiguousarray(each) for each in (settings, first_draws, streams, positions, proposed)]
        tokens = np.empty(total, np.int64)
        args = Draw(
            logits.data_ptr(),
            *(each.__array_interface__["data"][0] for each in arrays),
            tokens.__array_interface__["data"][0],
            self._workspace.handle,
            stride=logits.stride(0),
            num_rows=num_rows,
            vocab_size=vocab_size,
            num_proposed=proposed.shape[1],
            num_threads=torch.get_num_threads() if num_threads is None else num_threads,
        )
        library = self._workspace.library
        if library.functions.paged_draw(library.level, byref(args)):
            raise MemoryError("no memory for the scratch of drawing tokens natively")
        return tokens
