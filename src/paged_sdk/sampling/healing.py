"""Has a text begin with the end of its prompt, in tokens that may go over it."""

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
    """Bans the tokens that do not go on with the bytes that were taken from a prompt's end, until these are there."""

    def applies_until(self, request: Request) -> int:
        return 0 if request.healing is None else len(request.healing.data)

    def begin(self, request: Request) -> HealingState:
        assert request.healing is not None, "the request needs no healing"
        return HealingState(request.healing, [0])

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Failures:
        for row, fitting in changes:
            keep_only(logits[row], fitting)
        return NO_FAILURES


class HealingState(ProcessorState[npt.NDArray[np.int64]]):
    """Counts the bytes of one text.

    :param ends: how many bytes there are before its first token, and after each of them
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
