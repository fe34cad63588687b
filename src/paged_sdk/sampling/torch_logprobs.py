"""Computes logprobs of raw logits by torch, from logits on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_sdk.kernels.transfer import to_device
from paged_sdk.sampling.candidates import likeliest
from paged_sdk.sampling.raw_logprobs import RawLogprobs

__all__ = ["TorchLogprobTable"]


class TorchLogprobTable:
    """Implements :class:`~paged_sdk.sampling.logprobs.LogprobTable` where the native kernels cannot.

    See :class:`~paged_sdk.sampling.logprobs.MakeLogprobTable` for the parameters.
    """

    def __init__(self, logits: Tensor, top_n: int, *, logits_stay: bool = False) -> None:
        self._logprobs = torch.log_softmax(logits, dim=-1)  # which needs the logits no more
        self._top: list[tuple[tuple[int, float], ...]] = [()] * len(logits)
        if top_n:
            # By the logits: the logprobs of unequal ones may be rounded to the same number.
            _, tokens = likeliest(logits, min(top_n, logits.shape[1]))
            (index,) = to_device(logits.device, tokens)
            values = self._logprobs.gather(1, index).tolist()
            self._top = [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values, strict=True)]

    def entries(self, rows: Sequence[int], tokens: Sequence[int]) -> list[RawLogprobs]:
        """Implement :meth:`~paged_sdk.sampling.logprobs.LogprobTable.entries`."""
        device = self._logprobs.device
        index = (torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, tokens))
        chosen = self._logprobs[tuple(index)].tolist()
        return [
            RawLogprobs(token, logprob, self._top[row])
            for row, token, logprob in zip(rows, tokens, chosen, strict=True)
        ]
