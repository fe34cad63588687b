"""Defines logits processors, which change the logits of a sequence before its next token is chosen.

A processor is one file of this package and one entry in :func:`~paged_sdk.sampling.processors.default_processors`.
It has three parts. The :class:`Processor` knows whether a request needs it, and changes logits. A
:class:`ProcessorState` tracks one sequence. An optional :class:`DeviceProcessor` does the same work on a device, so
that sequences that need the processor can be sampled there.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import torch
from torch import Tensor

from paged_sdk.sampling.failures import Failures
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.request import Request

__all__ = [
    "ALL_TOKENS",
    "ConstantState",
    "DeviceProcessor",
    "Processor",
    "ProcessorState",
]

ALL_TOKENS: Final = sys.maxsize
"""More tokens than any sequence has."""

ChangeT = TypeVar("ChangeT")
StepT = TypeVar("StepT")


class ProcessorState(ABC, Generic[ChangeT]):
    """Tracks one sequence for one processor, so that nothing is recomputed from all tokens in every step.

    After any calls, a state equals a new state that was given the same tokens.
    """

    @abstractmethod
    def advance(self, token_ids: Sequence[int]) -> None:
        """Add output tokens."""

    @abstractmethod
    def roll_back(self, num_tokens: int) -> None:
        """Remove the last output tokens: rejected drafts, or tokens lost in a preemption.

        :param num_tokens: at most the number of output tokens
        """

    @abstractmethod
    def fork(self) -> Self:
        """Make a state for another choice of the request, with the same tokens so far."""

    @abstractmethod
    def change(self) -> ChangeT | None:
        """Compute the change to the logits of the next token; None: no change.

        This runs before the logits are available, while a CUDA device computes them. So expensive work belongs here, or
        in :meth:`Processor.prepare`, which completes the changes of all rows of a step together. Once prepared, a
        change is independent of later calls to the state.
        """


class ConstantState(ProcessorState[ChangeT]):
    """Makes the same change for every token of a sequence.

    :param change: the change
    """

    def __init__(self, change: ChangeT) -> None:
        self._change = change

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def roll_back(self, num_tokens: int) -> None:
        pass

    def fork(self) -> Self:
        return self

    def change(self) -> ChangeT | None:
        return self._change


class DeviceProcessor(ABC, Generic[StepT]):
    """Runs a processor on a device, where the tokens sampled last already are. No method waits for the device."""

    @abstractmethod
    def begin(self, rows: Sequence[SampleRow]) -> StepT | None:
        """Prepare a step, and the following steps of the same rows, each with one more token.

        :returns: the ``step`` argument of the other methods; None: no row needs this processor
        """

    @abstractmethod
    def apply(self, logits: Tensor, step: StepT) -> None:
        """Change the logits of a step's rows in place.

        :param logits: float32 ``[num_rows, vocab_size]``
        """

    @abstractmethod
    def advance(self, step: StepT, tokens: Tensor) -> None:
        """Add the sampled tokens.

        :param tokens: ``[num_rows]`` int64; below 0: no token
        """

    @abstractmethod
    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernels by running them on rows that do not need the processor, so that no request waits for
        compilation.

        :param logits: as for :meth:`apply`
        """

    @abstractmethod
    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has ended, if there is any."""


class Processor(ABC, Generic[ChangeT]):
    """Makes one kind of change to logits. Per-sequence data is kept in its states.

    :cvar answers_per_token: whether the sampler may call :meth:`allows` instead of :meth:`apply`; only for the last
        processor
    """

    answers_per_token: ClassVar[bool] = False

    @abstractmethod
    def applies_until(self, request: Request) -> int:
        """Return the number of leading output tokens that the processor may apply to.

        :returns: 0 if the request does not need the processor, :data:`ALL_TOKENS` if it applies to every token
        """

    @abstractmethod
    def begin(self, request: Request) -> ProcessorState[ChangeT]:
        """Make the state of a sequence at the end of its prompt.

        :param request: a request that needs the processor
        """

    def prepare(self, changes: Sequence[tuple[int, ChangeT]]) -> None:
        """Complete the changes of all rows of a step together, before the logits are available.

        Between :meth:`ProcessorState.change` and this call, states may only advance over drafts.

        :param changes: rows, and their changes
        """

    def only_token(self, change: ChangeT) -> int | None:
        """Return the only token that a prepared change allows; None if it allows several, or possibly none."""
        return None

    def allows(self, change: ChangeT, token: int) -> bool:
        """Tell whether a prepared change allows a token, that is, leaves its logit unchanged. All other tokens are
        banned. If the sampler takes an allowed token, the row's logits need not be changed.
        """
        return False

    @abstractmethod
    def apply(self, logits: Tensor, changes: Sequence[tuple[int, ChangeT]]) -> Failures:
        """Change the logits of rows in place. :meth:`prepare` has been called before.

        :param logits: float32 ``[N, vocab_size]``
        :param changes: rows, each at most once, and the changes to their logits
        :returns: rows whose requests have to end; their logits are not read
        """

    def device_bytes(self, max_num_seqs: int, vocab_size: int) -> int:
        """Return how many bytes of device memory the result of :meth:`on_device` takes."""
        return 0

    def on_device(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> DeviceProcessor[Any] | None:
        """Make the processor that does the same work on a device; None if there is none.

        :param max_num_seqs: the largest number of rows in a step
        """
        return None
