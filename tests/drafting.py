"""Make a proposer whose choice depends on no clock."""

from __future__ import annotations

from paged_sdk.scheduler.draft_account import DraftAccount
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.text_proposer import TextProposer


class FreeSteps(StepTimes):
    """Expects every step to take as long, so that every draft pays."""

    def expected(self, num_tokens: int) -> float:
        return 1.0


def drafting(
    gamma: int = 5, *, looks_back: bool = True, shares_texts: bool = True, times: StepTimes | None = None
) -> TextProposer:
    """Make a proposer that drafts whatever it can, up to ``gamma`` tokens for each text."""
    times = FreeSteps() if times is None else times
    return TextProposer(
        gamma, looks_back=looks_back, shares_texts=shares_texts, times=times, account=DraftAccount(times)
    )
