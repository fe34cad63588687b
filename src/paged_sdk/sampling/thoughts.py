"""Ends a model's reasoning when the request's thinking budget is used up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.chat.thoughts import ThoughtLimit
from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import Processor, ProcessorState
from paged_sdk.sampling.sparse import keep_only
from paged_sdk.scheduler.request import Request

__all__ = ["ThoughtEnd", "ThoughtEndState"]


class ThoughtEnd(Processor[npt.NDArray[np.int64]]):
    """Forces the mark that closes the reasoning after ``ThoughtLimit.length()`` tokens, if it is still open then."""

    def applies_until(self, request: Request) -> int:
        limit = request.thought_limit
        return 0 if limit is None else limit.most_tokens

    def begin(self, request: Request) -> ThoughtEndState:
        assert request.thought_limit is not None, "the request has no limit"
        return ThoughtEndState(request.thought_limit, [])

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Failures:
        keep_only(logits, changes)
        return NO_FAILURES


class ThoughtEndState(ProcessorState[npt.NDArray[np.int64]]):
    """Tracks the output of one sequence up to its limit.

    :param token_ids: output tokens so far
    """

    def __init__(self, limit: ThoughtLimit, token_ids: list[int]) -> None:
        self._limit = limit
        self._token_ids = token_ids
        self._length: int | None = None
        self._cuts = False

    def advance(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def roll_back(self, num_tokens: int) -> None:
        del self._token_ids[len(self._token_ids) - num_tokens :]
        if self._length is not None and len(self._token_ids) < self._length:
            self._length = None

    def fork(self) -> Self:
        return type(self)(self._limit, self._token_ids.copy())

    def change(self) -> npt.NDArray[np.int64] | None:
        if self._length is None:
            self._length = self._limit.length(self._token_ids)
            if self._length is None:
                return None
            self._cuts = self._limit.cuts(self._token_ids[: self._length])
        index = len(self._token_ids) - self._length
        is_closing = self._cuts and index < len(self._limit.closing_ids)
        return np.array([self._limit.closing_ids[index]], np.int64) if is_closing else None
