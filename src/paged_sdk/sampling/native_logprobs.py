"""Computes logprobs of raw logits on the CPU in one native call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_sdk.kernels.native.logprobs import NativeLogprobs
from paged_sdk.sampling.raw_logprobs import RawLogprobs

__all__ = ["NativeLogprobTable"]


class NativeLogprobTable:
    """Implements :class:`~paged_sdk.sampling.logprobs.LogprobTable` for logits on the CPU. Of tokens that tie for the
    last place, those with the lowest ids are listed.

    See :class:`~paged_sdk.sampling.logprobs.MakeLogprobTable` for the other parameters.

    :param native: computes them, once the chosen tokens are known
    """

    def __init__(self, native: NativeLogprobs, logits: Tensor, top_n: int, *, logits_stay: bool = False) -> None:
        self._native = native
        self._logits = logits if logits_stay else logits.clone()
        self._top_n = min(top_n, logits.shape[1])

    def entries(self, rows: Sequence[int], tokens: Sequence[int]) -> list[RawLogprobs]:
        """Implement :meth:`~paged_sdk.sampling.logprobs.LogprobTable.entries`."""
        if not tokens:
            return []
        chosen, top_tokens, top_logprobs = self._native(self._logits, self._top_n, rows, tokens)
        pairs, top_n = list(zip(top_tokens, top_logprobs, strict=True)), self._top_n
        return [
            RawLogprobs(token, logprob, tuple(pairs[row * top_n : (row + 1) * top_n]))
            for row, token, logprob in zip(rows, tokens, chosen, strict=True)
        ]
