"""Bans stop tokens until an output has its minimum number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from torch import Tensor

from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import Processor, ProcessorState
from paged_sdk.sampling.sparse import SparseChange, add_sparse
from paged_sdk.scheduler.request import Request

__all__ = ["MinTokens"]


class MinTokens(Processor[SparseChange]):
    """Bans a request's stop tokens until the output has ``SamplingParams.min_tokens`` tokens. Tokens that replace those
    removed by token healing come on top, as with ``max_len``.

    :param vocab_size: columns of the logits
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def applies_until(self, request: Request) -> int:
        return _least(request)

    def begin(self, request: Request) -> MinTokensState:
        tokens = np.array([token for token in request.stop_token_ids if token < self._vocab_size], np.int64)
        ban = SparseChange(tokens, np.full(len(tokens), -np.inf, np.float32))
        return MinTokensState(ban, _least(request))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, SparseChange]]) -> Failures:
        add_sparse(logits, changes)
        return NO_FAILURES


class MinTokensState(ProcessorState[SparseChange]):
    """Counts the output tokens of one sequence.

    :param ban: the change that applies while the output is too short
    :param num_missing: how many tokens are missing to the minimum; negative beyond it
    """

    def __init__(self, ban: SparseChange, num_missing: int) -> None:
        self._ban = ban
        self._num_missing = num_missing

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_missing -= len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        self._num_missing += num_tokens

    def fork(self) -> Self:
        return type(self)(self._ban, self._num_missing)

    def change(self) -> SparseChange | None:
        return self._ban if self._num_missing > 0 else None


def _least(request: Request) -> int:
    least, healing = request.sampling.min_tokens, request.healing
    return least + healing.num_tokens if least and healing is not None else least
