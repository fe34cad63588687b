"""What a runner makes of a step, now or later. No tensors here, so that a runner for tests needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import field, frozen

from paged_sdk.errors import PagedError
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.output import SchedulerOutput

__all__ = ["FinishedStep", "PendingStep", "Runner", "RunnerOutput"]


@frozen(eq=False)
class RunnerOutput:
    """The results of a step, row by row of ``SchedulerOutput.scheduled``.

    :ivar token_ids: per row ``num_samples`` tokens
    :ivar logprobs: per row one entry per token, or None where none were asked for
    :ivar prompt_logprobs: row to entries for the prompt tokens predicted within this chunk
    :ivar failed: row to the error that its request ends with, such as one of logits that are not finite; what else
        there is of such a row is passed over
    """

    token_ids: list[list[int]]
    logprobs: list[list[RawLogprobs] | None]
    prompt_logprobs: dict[int, list[RawLogprobs]] = field(factory=dict)
    failed: dict[int, PagedError] = field(factory=dict)

    def part(self, rows: Sequence[int]) -> RunnerOutput:
        """Make the results of a step that has only some of the rows.

        :param rows: indices of them, in order
        """
        places = {row: place for place, row in enumerate(rows)}
        return RunnerOutput(
            [self.token_ids[row] for row in rows],
            [self.logprobs[row] for row in rows],
            {places[row]: entries for row, entries in self.prompt_logprobs.items() if row in places},
            {places[row]: error for row, error in self.failed.items() if row in places},
        )


class PendingStep(Protocol):
    """A step that has been submitted."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step can be submitted before this one's result is taken: it finds the tokens that this one
        samples on the device. So no row here has several samples, but for the early ones."""
        ...

    @property
    def early_rows(self) -> Sequence[int]:
        """The rows of a step that overlaps whose results are there already, because the host has sampled them or they
        have failed. They are to be taken in before the next step is scheduled."""
        ...

    def early_result(self) -> RunnerOutput:
        """Return what is known already: the results of the early rows, without waiting for the device."""
        ...

    def result(self) -> RunnerOutput:
        """Wait for the device. To be called once."""
        ...


@frozen(eq=False)
class FinishedStep:
    """A step that was done by the time it had been submitted."""

    output: RunnerOutput
    overlaps: bool = field(default=False, kw_only=True)
    early_rows: Sequence[int] = field(default=(), kw_only=True)

    def early_result(self) -> RunnerOutput:
        """What it made."""
        return self.output

    def result(self) -> RunnerOutput:
        """What it made."""
        return self.output


class Runner(Protocol):
    """Executes steps, one after the other."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Begin to compute and sample one step of at least one row.

        Rows may end with a token that the scheduler does not know, if the step before hands it on.
        """
        ...

    def close(self) -> None:
        """Let go of the device's memory."""
        ...
