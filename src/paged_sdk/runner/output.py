"""Defines a runner and the results of its steps. No tensors are used here, so that a runner for tests needs none."""

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
    """There was no memory for a step, which has no results; raised from what said so. The device is sound.

    What the step has written is of no use: the KV of the tokens that its rows were to compute.
    """


@frozen(eq=False)
class RunnerOutput:
    """Holds the results of a step, row by row of ``SchedulerOutput.scheduled``.

    :ivar token_ids: per row ``num_samples`` tokens
    :ivar logprobs: per row one entry per token, or None where none were asked for
    :ivar prompt_logprobs: maps a row to entries for the prompt tokens predicted within this chunk
    :ivar failed: maps a row to the error that its request ends with, such as one about non-finite logits; other results
        of such a row are ignored
    :ivar forced: maps a row to the indices of those of its tokens that its constraint left no choice in
    :ivar readings: maps a row that ends a prompt to what was read off the whole prompt
    """

    token_ids: list[list[int]]
    logprobs: list[list[RawLogprobs] | None]
    prompt_logprobs: dict[int, list[RawLogprobs]] = field(factory=dict)
    failed: dict[int, PagedError] = field(factory=dict)
    forced: dict[int, list[int]] = field(factory=dict)
    readings: dict[int, ReadResult] = field(factory=dict)

    def part(self, rows: Sequence[int]) -> RunnerOutput:
        """Make the results of a step that has only some of the rows.

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
    """Gives the results of a step that has been submitted."""

    @property
    def overlaps(self) -> bool:
        """Say whether the next step can be submitted before this one's result is taken, since it reads the tokens that
        this one samples on the device. Only early and withheld rows of such a step may have several samples."""
        ...

    @property
    def early_rows(self) -> Sequence[int]:
        """Return the rows of an overlapping step whose results are known already, because the host has sampled them or
        they have failed. They must be taken in before the next step is scheduled."""
        ...

    @property
    def withheld_rows(self) -> Sequence[int]:
        """Return the rows of an overlapping step whose tokens the host samples when the result is asked for. Until then
        no step may have rows of their sequences. None of them is early."""
        ...

    def early_result(self) -> RunnerOutput:
        """Return the results of the early rows, without waiting for the device."""
        ...

    def result(self) -> RunnerOutput:
        """Wait for the device, sample the withheld rows, and return the results of all rows. To be called once."""
        ...


@frozen(eq=False)
class FinishedStep:
    """Holds the results of a step that was done when ``submit`` returned."""

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

        Rows may end with a token that the scheduler does not know yet, if the previous step overlaps.

        :raises StepMemoryError: there is no memory for the step; another may be submitted
        """
        ...

    def requantize(self, isq: IsqType, go_on: Callable[[], None]) -> None:
        """Hold the weights in another type, and forget all KV. No step may be under way.

        :param go_on: called from time to time; what it raises ends the work
        :raises EngineDeadError: the weights are neither as they were nor as they were to be
        :raises ModelLoadError: they are as they were
        """
        ...

    def close(self) -> None:
        """Free the device's memory."""
        ...
