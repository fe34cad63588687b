"""Learns from the times of steps what prompt tokens and drafts cost."""

from __future__ import annotations

from paged_sdk.scheduler.draft_account import DraftAccount, VerifiedDrafts
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.pace import Pace
from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["StepCosts"]


class StepCosts:
    """Learns from the times of steps what prompt tokens and drafts cost.

    :param max_slowdown: see :attr:`EngineConfig.max_slowdown`
    :ivar times: how long steps without prompts take, as far as is known
    :ivar drafts: what drafts have gained so far
    :ivar pace: divides a step's time between prompts and decodes; None: prompts may take any time
    """

    def __init__(self, max_slowdown: float) -> None:
        self.times: StepTimes = StepTimes()
        self.drafts: DraftAccount = DraftAccount(self.times)
        self.pace: Pace | None = None
        self._max_slowdown = max_slowdown
        self._verified: list[VerifiedDrafts] = []  # of the step whose time is noted next
        self._start_pace()

    def add_verified(self, verified: VerifiedDrafts) -> None:
        """Record the outcome of drafts, before the time of their step."""
        self._verified.append(verified)

    def note(self, output: SchedulerOutput, seconds: float, drafting_seconds: float = 0.0) -> None:
        """Record how long the step took whose results are known by now.

        :param seconds: how long the step took, without proposing drafts
        :param drafting_seconds: how long proposing them took
        """
        num_decodes, scheduled = output.num_decodes, output.scheduled
        num_drafts = sum(len(row.draft_token_ids) for row in scheduled[:num_decodes])
        verified, self._verified = self._verified, []
        if num_decodes == len(scheduled):
            self.drafts.note(num_decodes, verified, seconds, drafting_seconds)
            if any(each.num_forced for each in verified):
                return  # forced tokens need no logits, so other steps with as many tokens take longer
            if num_drafts or self.pace is None:
                self.times.note(num_decodes + num_drafts, seconds)
            else:
                self.pace.note_plain(seconds, num_decodes)
            return
        self.drafts.count(verified)
        if self.pace is None:
            return
        num_tokens = sum(row.num_new_tokens for row in scheduled[num_decodes:])
        num_pairs = sum(row.num_new_tokens * (row.start + row.num_new_tokens / 2) for row in scheduled[num_decodes:])
        self.pace.note_mixed(seconds, num_decodes + num_drafts, num_tokens, num_pairs / num_tokens)

    def forget(self) -> None:
        """Forget all times, and so what drafts gain: from now on the model computes differently."""
        self.times.clear()
        self.drafts.start_anew()
        self._start_pace()

    def _start_pace(self) -> None:
        self.pace = Pace(self._max_slowdown, self.times) if self._max_slowdown else None
