"""Defines logits processors, which change the logits of a text before its next token is chosen.

A processor is one file of this package and one entry in :func:`~paged_sdk.sampling.processors.default_processors`.
It has three parts. The processor itself knows whether a request needs it and changes logits. A :class:`ProcessorState`
follows one text. A :class:`DeviceProcessor`, where there is one, does the same work on a device, so that texts that
need it are sampled there.
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
"""Stands for more tokens than any text has."""

ChangeT = TypeVar("ChangeT")
StepT = TypeVar("StepT")


class ProcessorState(ABC, Generic[ChangeT]):
    """Follows one text for one processor, and keeps what would otherwise be computed again in every step.

    After any calls it equals a new state that was given the same tokens.
    """

    @abstractmethod
    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens that were added to the output."""

    @abstractmethod
    def roll_back(self, num_tokens: int) -> None:
        """Remove the last tokens, which were rejected drafts or were lost in a preemption.

        :param num_tokens: at most as many as the output has
        """

    @abstractmethod
    def fork(self) -> Self:
        """Make a state for another choice of the request, which has the same tokens so far."""

    @abstractmethod
    def change(self) -> ChangeT | None:
        """Compute the change to the logits that the next token is chosen by; None: no change.

        This runs before the logits are there, on a CUDA device while it computes them: long work belongs here, or in
        :meth:`Processor.prepare`, which completes the results of a step's rows together. After that, the result does
        not change when the state moves on.
        """


class ConstantState(ProcessorState[ChangeT]):
    """Changes the logits of every token of a text in the same way.

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
    """Runs a processor on a device, which already has the tokens sampled last. No method waits for the device."""

    @abstractmethod
    def begin(self, rows: Sequence[SampleRow]) -> StepT | None:
        """Prepare a step, and the following ones with the same rows, each with one more token.

        :returns: what the other methods need; None: no row needs this processor
        """

    @abstractmethod
    def apply(self, logits: Tensor, step: StepT) -> None:
        """Change the logits of a step's rows in place.

        :param logits: float32 ``[num_rows, vocab_size]``
        """

    @abstractmethod
    def advance(self, step: StepT, tokens: Tensor) -> None:
        """Take the sampled tokens.

        :param tokens: ``[num_rows]`` int64; below 0: no token
        """

    @abstractmethod
    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernels by running them on rows that do not need the processor, so that no request waits for
        that.

        :param logits: as for :meth:`apply`
        """

    @abstractmethod
    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has ended, if there is any."""


class Processor(ABC, Generic[ChangeT]):
    """Makes one kind of change to logits. It keeps nothing about any text: states do.

    :cvar asks: whether :meth:`allows` is to be asked, which only the last processor can be
    """

    asks: ClassVar[bool] = False

    @abstractmethod
    def applies_until(self, request: Request) -> int:
        """Return how many tokens of each text, from the first of its output on, it may apply to.

        :returns: 0 if the request does not need it, :data:`ALL_TOKENS` if every token does
        """

    @abstractmethod
    def begin(self, request: Request) -> ProcessorState[ChangeT]:
        """Follow a text from the end of its prompt on.

        :param request: one that needs the processor
        """

    def prepare(self, changes: Sequence[tuple[int, ChangeT]]) -> None:
        """Work out together what is missing of all changes of a step, before the logits are there.

        Until then, states may move on to drafts, and not otherwise.

        :param changes: what :meth:`apply` will be called with
        """

    def only_token(self, change: ChangeT) -> int | None:
        """Return the only token that a prepared change leaves; None: there are several, or it may be none."""
        return None

    def allows(self, change: ChangeT, token: int) -> bool:
        """Tell whether a prepared change leaves a token as it is; all others it bans. A row that is content with such a
        token need not be changed.
        """
        return False

    @abstractmethod
    def apply(self, logits: Tensor, changes: Sequence[tuple[int, ChangeT]]) -> Failures:
        """Change the logits of some rows in place, once :meth:`prepare` has been called.

        :param logits: float32 ``[N, vocab_size]``
        :param changes: rows, each at most once, and the changes to their logits
        :returns: rows whose requests are to end; their logits are not read
        """

    def device_bytes(self, max_num_seqs: int, vocab_size: int) -> int:
        """Return how many bytes of a device :meth:`on_device` takes."""
        return 0

    def on_device(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> DeviceProcessor[Any] | None:
        """Make the processor that does the same work on a device; None: only the host can do it.

        :param max_num_seqs: the most rows that a step has
        """
        return None
