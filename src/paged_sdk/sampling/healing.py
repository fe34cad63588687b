"""Restricts the first tokens of an output to the bytes that token healing removed from the end of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paged_sdk.chat.token_healing import Healing
from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import Processor, ProcessorState
from paged_sdk.sampling.sparse import keep_only
from paged_sdk.scheduler.request import Request

__all__ = ["TokenHealing"]


class TokenHealing(Processor[npt.NDArray[np.int64]]):
    """Bans tokens that do not fit the bytes removed from the end of the prompt, until all of these are generated."""

    def applies_until(self, request: Request) -> int:
        return 0 if request.healing is None else len(request.healing.data)

    def begin(self, request: Request) -> HealingState:
        assert request.healing is not None, "the request needs no healing"
        return HealingState(request.healing, [0])

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Failures:
        keep_only(logits, changes)
        return NO_FAILURES


class HealingState(ProcessorState[npt.NDArray[np.int64]]):
    """Counts the output bytes of one sequence.

    :param ends: number of output bytes before the first token (0), and after each output token
    """

    def __init__(self, healing: Healing, ends: list[int]) -> None:
        self._healing = healing
        self._ends = ends

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._ends.append(self._ends[-1] + self._healing.prefixes.size_of(token_id))

    def roll_back(self, num_tokens: int) -> None:
        del self._ends[len(self._ends) - num_tokens :]

    def fork(self) -> Self:
        return type(self)(self._healing, self._ends.copy())

    def change(self) -> npt.NDArray[np.int64] | None:
        missing = self._healing.data[self._ends[-1] :]
        return self._healing.prefixes.fitting(missing) if missing else None
