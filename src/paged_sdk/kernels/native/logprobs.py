"""Computes logprobs of chosen and of the likeliest tokens of rows of logits in one native call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary, Workspace
from paged_sdk.kernels.native.linear import check_matrix
from paged_sdk.kernels.native.structures_sampling import Logprobs

__all__ = ["NativeLogprobs"]


class NativeLogprobs:
    """Computes logprobs: logit - log(sum of e^logit), in natural logarithms.

    Weights and sums of 128 of them are float32, all that follows is float64: logprobs are off by 2e-7 where torch's
    log-softmax in float32 is by 1.5e-5 (the most seen with 262,144 tokens). They are never above 0. A row's logprobs
    depend on the row alone.

    It is used by one call at a time.

    :param library: the loaded library
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._workspace = Workspace(library)
        self._args = Logprobs(workspace=self._workspace.handle)
        self._reference = byref(self._args)

    def __call__(
        self,
        logits: Tensor,
        top_n: int,
        rows: Sequence[int],
        tokens: Sequence[int],
        *,
        num_threads: int | None = None,
    ) -> tuple[list[float], list[int], list[float]]:
        """Compute the logprobs of pairs of a row and a token, and of the likeliest tokens of every row.

        Numbers travel in arrays, for the reason of :meth:`~paged_sdk.kernels.native.draw.NativeDraw.one_each`.

        :param logits: float32 ``[num_rows, vocab_size]``; rows contiguous
        :param top_n: at most vocab_size
        :param rows: of each pair, any number of them
        :param tokens: of each pair
        :param num_threads: torch's own number by default
        :returns: the logprobs of the pairs; the likeliest tokens, ``num_rows * top_n`` row after row, by falling logit,
            equal ones by rising id; and their logprobs. The logprobs of a row with NaN, or whose largest logit is not
            finite, are NaN, and its likeliest tokens are the first ones
        :raises ConfigError: shape, dtype or strides of the logits do not fit
        :raises MemoryError: there is no memory for 8 bytes per thread and token of the vocabulary
        """
        num_rows, vocab_size = logits.shape
        check_matrix("logits", logits, (num_rows, vocab_size), (torch.float32,))
        assert 0 <= top_n <= vocab_size, (top_n, vocab_size)
        assert len(rows) == len(tokens), (len(rows), len(tokens))
        assert all(0 <= row < num_rows for row in rows), (rows, num_rows)
        assert all(0 <= token < vocab_size for token in tokens), (tokens, vocab_size)
        own_rows, own_tokens, chosen = array("q", rows), array("q", tokens), array("d", bytes(8 * len(rows)))
        num_listed = num_rows * top_n
        top_tokens, top_logprobs = array("q", bytes(8 * num_listed)), array("d", bytes(8 * num_listed))
        args, library = self._args, self._workspace.library
        args.logits, args.stride = logits.data_ptr(), logits.stride(0)
        args.chosen_rows, args.chosen_tokens = own_rows.buffer_info()[0], own_tokens.buffer_info()[0]
        args.chosen_logprobs, args.num_chosen = chosen.buffer_info()[0], len(rows)
        args.top_tokens, args.top_logprobs = top_tokens.buffer_info()[0], top_logprobs.buffer_info()[0]
        args.num_rows, args.vocab_size, args.top_n = num_rows, vocab_size, top_n
        args.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        if library.functions.paged_logprobs(library.level, self._reference):
            raise MemoryError("no memory for the scratch of computing logprobs natively")
        return chosen.tolist(), top_tokens.tolist(), top_logprobs.tolist()
