"""Computes logprobs of raw logits on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_sdk.sampling.candidates import likeliest
from paged_sdk.sampling.raw_logprobs import RawLogprobs

__all__ = ["LogprobTable"]


class LogprobTable:
    """Keeps the logprobs of raw logits, which processors then change in place.

    :param logits: float32 ``[R, V]``
    :param top_n: how many of the likeliest tokens an entry lists; capped at V
    """

    def __init__(self, logits: Tensor, top_n: int) -> None:
        self._logprobs = torch.log_softmax(logits, dim=-1)
        self._top: list[tuple[tuple[int, float], ...]] = [()] * len(logits)
        if top_n:
            values, tokens = likeliest(self._logprobs, min(top_n, logits.shape[1]))
            self._top = [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]

    def entries(self, rows: Sequence[int], tokens: Sequence[int]) -> list[RawLogprobs]:
        """Make one entry per pair of a row and a token chosen for it."""
        device = self._logprobs.device
        index = (torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, tokens))
        chosen = self._logprobs[tuple(index)].tolist()
        return [
            RawLogprobs(token, logprob, self._top[row])
            for row, token, logprob in zip(rows, tokens, chosen, strict=True)
        ]
