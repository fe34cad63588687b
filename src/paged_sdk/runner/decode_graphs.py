"""Records decode steps and replays them: one launch replaces several hundred."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import Recorded
from paged_sdk.runner.step_table import Record, StepTable

__all__ = ["DecodeGraphs", "batch_sizes", "context_bounds"]

# A recorded step is launched for the longest context within its bound. Attention splits longer contexts than this one
# even if the rows alone occupy the device; in most steps, the programs of those splits would have no work.
_USUAL_CONTEXT: Final = 8192
# Factor between bounds. Beyond the first bound, a step is launched for less than twice this factor times its context.
# Each bound adds a recording for every number of rows.
_BOUND_STEP: Final = 4

# Tolerance as a fraction of the largest value: cuBLAS may sum in another order while it is recorded. A replay that read
# the wrong memory would differ by more.
_MOST_DIFFERENCE: Final = 0.05

# (bound, increment) of the numbers of rows: beyond 16 rows, at most 7 of a step's 24 rows are padding.
_STEPS: Final = ((4, 1), (16, 4), (64, 8), (256, 16), (1 << 30, 32))


def batch_sizes(largest: int) -> list[int]:
    """Return the numbers of rows to record steps for, ascending: a step is padded to the next."""
    sizes: list[int] = []
    for bound, step in _STEPS:
        first = sizes[-1] + step if sizes else step
        sizes += range(first, min(bound, largest) + 1, step)
    return sizes if sizes and sizes[-1] == largest else [*sizes, largest]


def context_bounds(max_model_len: int) -> list[int]:
    """Return the context lengths to record steps for, ascending."""
    bounds = [min(_USUAL_CONTEXT, max_model_len)]
    while 2 * _BOUND_STEP * bounds[-1] <= max_model_len:
        bounds.append(_BOUND_STEP * bounds[-1])
    return bounds if bounds[-1] == max_model_len else [*bounds, max_model_len]


class DecodeGraphs:
    """Runs recorded decode steps, up to the largest number of rows and the longest context recorded.

    One copy sends a step's input to the device. Tokens that the previous step sampled are read on the device. A step
    computes the logits of all rows and their likeliest tokens.

    :param sizes: numbers of rows to record steps for
    :param bounds: context lengths to record each size for
    :param record: records a step; may call the step's function any number of times
    :ivar errors: errors of failed recordings; the next larger step or context bound is used in place of each
    :ivar largest: number of rows of the largest step
    :raises Exception: the first of these errors, if no step for the longest context could be recorded
    """

    def __init__(
        self,
        layers: RecordableLayers,
        *,
        sizes: Iterable[int],
        bounds: Iterable[int],
        record: Record,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._layers = layers

        def make(size: int, bound: int) -> _DecodeStep:
            return _DecodeStep(layers, self._empty_input(size).to(layers.device), bound)

        self._table = StepTable(sizes, bounds, make, record, on_progress)
        self.errors: list[Exception] = self._table.errors
        self.largest: int = self._table.largest

    def check(self) -> None:
        """Replay every recorded step once on padding only, and compare a replayed step of one row with its launched
        form. Call this before there are sequences: the row writes to block 0.

        :raises RuntimeError: the device refuses a replay, or the two results differ
        """
        self._table.replay_all()
        seat = self._layers.backend.seats([-1], [0], [[0]])  # no sequence has id -1
        recorded = self._table.find(1, 1)
        input_ = recorded.step.input
        padding = input_.clone()
        input_[:2, 0] = torch.tensor([int(seat[0]), 0], device=self._layers.device)
        recorded.replay()
        replayed = self._layers.results.of(1, [0]).hidden.clone()
        recorded.step.run()
        launched = self._layers.results.of(1, [0]).hidden
        input_.copy_(padding)
        most = _MOST_DIFFERENCE * float(launched.abs().max())
        if not torch.allclose(replayed, launched, rtol=0.0, atol=most, equal_nan=True):
            raise RuntimeError("a replayed step has another result than a launched one")

    def forward(
        self,
        seq_ids: Sequence[int],
        versions: Sequence[int],
        tables: Sequence[Sequence[int]],
        positions: Sequence[int],
        token_ids: Sequence[int] | None,
        sources: Sequence[int],
        places: Sequence[int],
    ) -> Recorded:
        """Run a step of one token per row.

        :param seq_ids: the sequences of the rows, at most :attr:`largest`
        :param versions: versions of their block tables: see :attr:`~paged_sdk.types.step.StepRow.kv_version`
        :param tables: their block tables
        :param positions: positions of the tokens, below the largest bound
        :param token_ids: token ids, ignored where ``sources`` is not -1; None: all are read on the device
        :param sources: index of each token among the tokens that the previous step sampled; -1: take ``token_ids``
        :param places: adapter slots of the rows; -1: none
        """
        num_rows = len(tables)
        recorded = self._table.find(num_rows, max(positions) + 1)
        seats = self._layers.backend.seats(seq_ids, versions, tables)
        # No variable holds the pinned input during the replay, which may find that the device has failed: see
        # HostCopies.
        recorded.step.input.copy_(
            self._input(recorded.size, num_rows, seats, positions, token_ids, sources, places), non_blocking=True
        )
        recorded.replay()
        return self._layers.results.of(num_rows, list(range(num_rows)))

    def _input(self, size: int, num_rows: int, *columns: Sequence[int] | npt.NDArray[np.int64] | None) -> Tensor:
        """Make a step's input on the host; a column that is None keeps the padding's values."""
        host = self._empty_input(size)
        for column, values in zip(host.numpy(), columns, strict=True):
            if values is not None:
                column[:num_rows] = values
        return host

    def _empty_input(self, size: int) -> Tensor:
        """Make input of padding rows only: seats, positions, tokens, sources, adapter slots."""
        host = self._layers.host_input(5, size)
        for column, value in zip(host.numpy(), (self._layers.backend.empty_seat, -1, 0, -1, -1), strict=True):
            column.fill(value)
        return host


class _DecodeStep:
    """Runs a step of a fixed number of rows, over contexts up to a bound, so that it can be recorded.

    :ivar input: ``[5, size]`` int64: seats, positions, tokens, sources, adapter slots
    """

    def __init__(self, layers: RecordableLayers, input_: Tensor, bound: int) -> None:
        self.input = input_
        self._bound = bound
        self._layers = layers

    def run(self) -> None:
        """Run the step with device operations only, whose shapes do not depend on values of the input."""
        seats, positions, token_ids, sources, places = self.input.unbind()
        layers = self._layers
        attention = layers.backend.decode(seats, positions, self._bound)
        hidden = layers.forward(token_ids, positions, sources, places, attention)
        layers.results.keep(hidden, layers.model.logits(hidden))
