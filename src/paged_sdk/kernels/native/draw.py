"""Draws tokens from rows of logits in one native call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
        self._args = Draw(workspace=self._workspace.handle)
        self._reference = byref(self._args)

    def one_each(
        self, logits: Tensor, settings: bytes, positions: Sequence[int], *, num_threads: int | None = None
    ) -> list[int]:
        """Draw a token from each row, with the random numbers of the stream in its settings.

        Between two steps of a model every operation takes several times what it takes in a loop, so there are few.

        :param logits: as for :meth:`__call__`
        :param settings: the records of the rows, one after the other
        :param positions: of each row, in its stream
        :returns: token ids, as of :meth:`__call__`
        :raises ConfigError: as :meth:`__call__`
        :raises MemoryError: as :meth:`__call__`
        """
        num_rows = len(positions)
        assert len(settings) == num_rows * DRAW_SETTINGS.itemsize, (len(settings), num_rows)
        records, places, tokens = array("b", settings), array("q", positions), array("q", bytes(8 * num_rows))
        args = self._args
        args.settings, args.positions = records.buffer_info()[0], places.buffer_info()[0]
        args.first_draws = args.streams = args.proposed = None
        args.num_proposed, args.tokens = 0, tokens.buffer_info()[0]
        self._run(logits, num_rows, num_threads)
        return tokens.tolist()

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
        num_rows = len(settings)
        first_draws = np.zeros(num_rows + 1, np.int64)
        num_draws.cumsum(out=first_draws[1:])
        total = int(first_draws[-1])
        proposed = np.empty((total, 0), np.int64) if proposed is None else proposed
        assert settings.dtype == DRAW_SETTINGS, settings.dtype
        for each in (streams, positions, proposed):
            assert each.dtype == np.int64, each.dtype
            assert len(each) == total, (each.shape, total)
        arrays = [np.ascontiguousarray(each) for each in (settings, first_draws, streams, positions, proposed)]
        tokens = np.empty(total, np.int64)
        args = self._args
        args.settings, args.first_draws, args.streams, args.positions, args.proposed = (
            each.ctypes.data for each in arrays
        )
        args.num_proposed, args.tokens = proposed.shape[1], tokens.ctypes.data
        self._run(logits, num_rows, num_threads)
        return tokens

    def _run(self, logits: Tensor, num_rows: int, num_threads: int | None) -> None:
        """Call the kernel; the other arguments have been set."""
        vocab_size = logits.shape[1]
        check_matrix("logits", logits, (num_rows, vocab_size), (torch.float32,))
        args, library = self._args, self._workspace.library
        args.logits, args.stride = logits.data_ptr(), logits.stride(0)
        args.num_rows, args.vocab_size = num_rows, vocab_size
        args.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        if library.functions.paged_draw(library.level, self._reference):
            raise MemoryError("no memory for the scratch of drawing tokens natively")
