"""What a runner makes of a step, now or later. No tensors here, so that a runner for tests needs none."""

from __future__ import annotations

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


class PendingStep(Protocol):
    """A step that has been submitted."""

    @property
    def overlaps(self) -> bool:
        """Whether the next step can be submitted before this one's result is taken: it finds the tokens that this one
        samples on the device. So no row here has several samples."""
        ...

    def result(self) -> RunnerOutput:
        """Wait for the device. To be called once."""
        ...


@frozen(eq=False)
class FinishedStep:
    """A step that was done by the time it had been submitted."""

    output: RunnerOutput
    overlaps: bool = field(default=False, kw_only=True)

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
