"""Defines the interface of runners and the results of steps, without tensors, so that tests' runners need none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import field, frozen

from paged_sdk.config.isq import IsqType
from paged_sdk.errors import PagedError
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.types.reading import ReadResult

__all__ = ["FinishedStep", "PendingStep", "Runner", "RunnerOutput", "StepMemoryError"]


class StepMemoryError(Exception):
    """A step ran out of memory and has no results; the original error is its ``__cause__``. The device still works.

    KV that the step has already written is invalid.
    """


@frozen(eq=False)
class RunnerOutput:
    """Holds the results of a step, row by row of ``SchedulerOutput.scheduled``.

    :ivar token_ids: per row ``num_samples`` tokens
    :ivar logprobs: per row one entry per token; None if not requested
    :ivar prompt_logprobs: maps a row to the entries of prompt tokens predicted within this chunk
    :ivar failed: maps a row to the error that its request ends with, such as non-finite logits; other results of such a
        row are ignored
    :ivar forced: maps a row to the indices of its tokens that were forced by its constraint
    :ivar readings: maps a row that ends a prompt to the result of the request's reading, such as a pooled vector
    """

    token_ids: list[list[int]]
    logprobs: list[list[RawLogprobs] | None]
    prompt_logprobs: dict[int, list[RawLogprobs]] = field(factory=dict)
    failed: dict[int, PagedError] = field(factory=dict)
    forced: dict[int, list[int]] = field(factory=dict)
    readings: dict[int, ReadResult] = field(factory=dict)

    def part(self, rows: Sequence[int]) -> RunnerOutput:
        """Return the results of some of the rows.

        :param rows: the indices of these rows, ascending
        """
        places = {row: place for place, row in enumerate(rows)}
        return RunnerOutput(
            [self.token_ids[row] for row in rows],
            [self.logprobs[row] for row in rows],
            {places[row]: entries for row, entries in self.prompt_logprobs.items() if row in places},
            {places[row]: error for row, error in self.failed.items() if row in places},
            {places[row]: indices for row, indices in self.forced.items() if row in places},
            {places[row]: result for row, result in self.readings.items() if row in places},
        )


class PendingStep(Protocol):
    """Provides the results of a submitted step."""

    @property
    def overlaps(self) -> bool:
        """Tell whether the next step can be submitted before this one's result is taken, since it reads this step's
        sampled tokens on the device. Only early and withheld rows of such a step may have several samples."""
        ...

    @property
    def early_rows(self) -> Sequence[int]:
        """Return the rows of an overlapping step whose results are known already, because the host has sampled them or
        they have failed. The scheduler must get their results before it schedules the next step."""
        ...

    @property
    def withheld_rows(self) -> Sequence[int]:
        """Return the rows of an overlapping step whose tokens the host samples in :meth:`result`. Until then, no step
        may have rows of their sequences. No withheld row is early."""
        ...

    def early_result(self) -> RunnerOutput:
        """Return the results of the early rows, without waiting for the device."""
        ...

    def result(self) -> RunnerOutput:
        """Wait for the device, sample the withheld rows, and return the results of all rows. Call this once."""
        ...


@frozen(eq=False)
class FinishedStep:
    """Holds the results of a step that was complete when ``submit`` returned."""

    output: RunnerOutput
    overlaps: bool = field(default=False, kw_only=True)
    early_rows: Sequence[int] = field(default=(), kw_only=True)
    withheld_rows: Sequence[int] = field(default=(), kw_only=True)

    def early_result(self) -> RunnerOutput:
        """Return the results of the step."""
        return self.output

    def result(self) -> RunnerOutput:
        """Return the results of the step."""
        return self.output


class Runner(Protocol):
    """Runs steps, one after the other."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start to compute and sample one step of at least one row.

        If the previous step overlaps, rows may end with a token that the scheduler does not know yet.

        :raises StepMemoryError: the step ran out of memory; another step may be submitted
        """
        ...

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        """Quantize the weights to another type, and drop all KV. No step may be in flight.

        :param check_cancelled: called regularly; an exception that it raises stops the work
        :raises EngineDeadError: requantizing failed, and the old weights could not be restored
        :raises ModelLoadError: requantizing failed; the old weights are in use again
        """
        ...

    def close(self) -> None:
        """Free the device's memory."""
        ...
