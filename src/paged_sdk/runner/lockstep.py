"""Runs a model on all ranks in lockstep, each with the same code: for trial steps and for recording steps."""

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


def recorded_alike(record: Record, group: Group) -> Record:
    """Return a recording function whose steps are recorded on all ranks or on none.

    If it fails on all ranks, it raises their own errors, and another step can be tried. If it fails on some ranks only,
    it raises an EngineError: the other ranks would wait for the operations that these have left out.
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
