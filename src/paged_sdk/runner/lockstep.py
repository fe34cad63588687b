"""Runs a model on all ranks in lockstep, each with the same code: for trial steps and for recording steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paged_sdk.errors import EngineError
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.triton.availability import launch_errors
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.parallel.group import Group
from paged_sdk.runner.step_table import Record

__all__ = ["LockstepModel", "all_or_none", "recorded_alike"]


class LockstepModel:
    """Computes logits in lockstep on all ranks, while otherwise rank 0 sends the other ranks requests for logits."""

    def __init__(self, model: CausalModel, group: Group) -> None:
        self._model = model
        self._group = group

    @property
    def device(self) -> torch.device:
        """Return the device that holds this rank's weights."""
        return self._model.device

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Implement :meth:`CausalModel.forward`."""
        return self._model.forward(token_ids, positions, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        """Implement :meth:`CausalModel.normed`."""
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Implement :meth:`CausalModel.logits`, in lockstep on all ranks."""
        with self._group.in_lockstep():
            return self._model.logits(hidden, adapted)


@contextmanager
def all_or_none(group: Group | None) -> Iterator[None]:
    """Have all ranks succeed in recording what a ``with`` block records, or all fail: another rank would wait for ever
    for the operations of one that goes on without a recording.

    A block ends by exchanging whether it has failed, so all ranks must enter the same blocks in the same order. In a
    block, recordings are those of :func:`recorded_alike`.

    :param group: the ranks; None: one process, whose errors are raised as they are
    :raises EngineError: the block failed on some ranks only. If it failed on all, their own errors are raised, and
        something else can be tried
    """
    error: Exception | None = None
    try:
        yield
    except launch_errors() as raised:
        if group is None:
            raise
        error = raised
    if group is not None:
        _agree(error, group)


def recorded_alike(record: Record, group: Group) -> Record:
    """Return a recording function whose steps are recorded on all ranks or on none; see :func:`all_or_none`.

    A recording begins by exchanging whether all ranks have come to it: one may have failed between two recordings.
    """

    def record_alike(function: Callable[[], None]) -> Callable[[], None]:
        _agree(None, group)
        with all_or_none(group):
            return record(function)

    return record_alike


def _agree(error: Exception | None, group: Group) -> None:
    """Raise this rank's error if all ranks have one, and an EngineError if only some do."""
    all_well, all_failed = group.smallest(error is None), group.smallest(error is not None)
    if error is not None and all_failed:
        raise error
    if not all_well:
        cause = group.first_error(error)
        raise EngineError(f"a step can be recorded on some ranks only ({cause})") from cause
