"""Runs a model on all ranks by the same code: for trial, and to record steps, each rank its part of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paged_sdk.errors import EngineError
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.triton.availability import launch_errors
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.parallel.group import Group
from paged_sdk.runner.step_table import Record

__all__ = ["LockstepModel", "recorded_alike"]


class LockstepModel:
    """Computes logits on all ranks at once, where the first one would have the others help otherwise."""

    def __init__(self, model: CausalModel, group: Group) -> None:
        self._model = model
        self._group = group

    @property
    def device(self) -> torch.device:
        """Return the device that holds this rank's weights."""
        return self._model.device

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Do what :meth:`CausalModel.forward` says."""
        return self._model.forward(token_ids, positions, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        """Do what :meth:`CausalModel.normed` says."""
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Do what :meth:`CausalModel.logits` says, on all ranks."""
        with self._group.in_lockstep():
            return self._model.logits(hidden, adapted)


def recorded_alike(record: Record, group: Group) -> Record:
    """Return what records steps on all ranks or on none: a step that one of them runs waits for the others' parts.

    Recording raises an EngineError where some ranks have failed: what they have left out, others wait for.
    """

    def record_alike(function: Callable[[], None]) -> Callable[[], None]:
        error: Exception | None = None
        replay = None
        try:
            replay = record(function)
        except launch_errors() as raised:
            error = raised
        do_all, does_one = group.smallest(error is None), not group.smallest(error is not None)
        if error is not None and not does_one:
            raise error
        if replay is None or not do_all:
            raise EngineError("a step can be recorded on some ranks only") from error
        return replay

    return record_alike
