"""Adds the bias of a request to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import ALL_TOKENS, ConstantState, Processor
from paged_sdk.sampling.sparse import SparseChange, add_sparse
from paged_sdk.scheduler.request import Request

__all__ = ["LogitsBias"]


class LogitsBias(Processor[SparseChange]):
    """Adds ``SamplingParams.logits_bias``.

    :param vocab_size: columns of the logits
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def applies_until(self, request: Request) -> int:
        return ALL_TOKENS if request.sampling.logits_bias else 0

    def begin(self, request: Request) -> ConstantState[SparseChange]:
        # A token id beyond the vocabulary can never be chosen and needs no bias.
        bias = {
            token: amount for token, amount in (request.sampling.logits_bias or {}).items() if token < self._vocab_size
        }
        exact = np.array(list(bias.values()), np.float64)
        # Finite values stay finite in float32, even divided by a repetition penalty of 0.01; -inf stays a ban.
        amounts = np.where(np.isneginf(exact), exact, exact.clip(-1e30, 1e30)).astype(np.float32)
        return ConstantState(SparseChange(np.array(list(bias), np.int64), amounts))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, SparseChange]]) -> Failures:
        add_sparse(logits, changes)
        return NO_FAILURES
