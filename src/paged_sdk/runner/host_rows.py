"""Samples the rows of a step that need the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from attrs import frozen
from torch import Tensor

from paged_sdk.runner.output import RunnerOutput
from paged_sdk.runner.targets import Target, note_sampled
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.sampler import PreparedRows, Sampler, take_likeliest
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["HostRows"]


@frozen(eq=False)
class HostRows:
    """Holds the tokens of a step that are sampled on the host.

    :param scheduled: all rows of the step
    :param targets: the tokens to sample
    """

    sampler: Sampler
    scheduled: Sequence[ScheduledSequence]
    targets: Sequence[Target]
    prepared: PreparedRows

    @classmethod
    def prepare(cls, sampler: Sampler, scheduled: Sequence[ScheduledSequence], targets: Sequence[Target]) -> Self:
        """Do the part of sampling that needs no logits."""
        return cls(sampler, scheduled, targets, sampler.prepare([target.row for target in targets]))

    @property
    def rows(self) -> list[int]:
        """Return the indices of the rows."""
        return sorted({target.index for target in self.targets})

    @property
    def settled(self) -> set[int]:
        """Return the places, among all targets of the step, of targets that need no logits."""
        return {self.targets[each].place for each in self.prepared.known_tokens}

    @property
    def asked(self) -> list[Target]:
        """Return the targets that need logits."""
        return [target for each, target in enumerate(self.targets) if each not in self.prepared.known_tokens]

    @property
    def places(self) -> list[int]:
        """Return the places of :attr:`asked` among all targets of the step that need logits."""
        return [target.place for target in self.asked]

    def take(self, likeliest: Tensor, result: RunnerOutput) -> None:
        """Take the likeliest token for every target; for rows that ask for nothing else
        (:attr:`~paged_sdk.sampling.sampler.PreparedRows.is_plain`).

        :param likeliest: int64 ``[len(targets)]``; :data:`~paged_sdk.kernels.sampling.NOT_DRAWN` fails the row
        :param result: receives the tokens
        """
        sampled = take_likeliest(likeliest.tolist(), self.prepared.rows)
        note_sampled(self.scheduled, self.targets, sampled, self.prepared.forced, result)

    def sample(self, logits: Callable[[], Tensor], once_more: Callable[[], Tensor], result: RunnerOutput) -> None:
        """Sample all targets together; if that raises, one at a time, so that only those that raise fail.

        :param logits: makes float32 logits, one row for each of :attr:`asked`; they are overwritten
        :param once_more: makes the same logits again, for the second attempt
        :param result: receives the tokens
        """
        asked = self.prepared.needing_logits()
        try:
            sampled = self.sampler.sample(logits(), asked)
        except Exception:
            sampled = self.sampler.sample_alone(once_more(), asked.rows)
        sampled = sampled.with_known_tokens(self.prepared)
        note_sampled(self.scheduled, self.targets, sampled, self.prepared.forced, result)

    def sample_later(self, logits: Tensor, result: RunnerOutput) -> None:
        """Sample while the next step is in flight. Sequences that have been preempted or have ended since get no token.

        :param logits: float32, one row for each of :attr:`asked`; not overwritten
        """
        current = [each for each, target in enumerate(self.targets) if self.scheduled[target.index].is_current]
        rows = self
        if len(current) < len(self.targets):
            targets = [self.targets[each] for each in current]
            rows = HostRows(self.sampler, self.scheduled, targets, self.prepared.part(current))
            left = {id(target) for target in rows.asked}
            places = [place for place, target in enumerate(self.asked) if id(target) in left]
            logits = select_rows(logits, places) if places else logits[:0]
        rows.sample(logits.clone, lambda: logits, result)
