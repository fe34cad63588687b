"""What drafts may lose."""

from __future__ import annotations

import random

import pytest

from paged_sdk.scheduler.draft_account import (
    MAX_BALANCE,
    PLAIN_STEP_GAIN,
    REFRESH,
    START_BALANCE,
    DraftAccount,
    DraftBalance,
    VerifiedDrafts,
)
from paged_sdk.scheduler.step_times import StepTimes


class Drafts:
    """Lets one proposer draft for the first of some texts."""

    def __init__(self, plain: float = 1.0, num_decodes: int = 1) -> None:
        self.times = StepTimes()
        self.account = DraftAccount(self.times)
        self.balance = self.account.open_balance()
        self._num_decodes = num_decodes
        self.without(plain)

    @property
    def allows(self) -> bool:
        return self.balance.allows

    def verified(
        self,
        num_drafts: int,
        num_accepted: int,
        seconds: float,
        *,
        num_forced: int = 0,
        drafting: float = 0.0,
        balance: DraftBalance | None = None,
    ) -> None:
        """Take in a step that verified drafts."""
        (balance or self.balance).claim([7], drafting)
        found = VerifiedDrafts(7, num_drafts, num_accepted, num_forced)
        self.account.note(self._num_decodes, [found], seconds, drafting)

    def without(self, seconds: float) -> None:
        """Take in a step that verified none."""
        self.account.note(self._num_decodes, [], seconds)
        self.times.note(self._num_decodes, seconds)


def test_drafts_that_are_never_right_end_after_what_they_may_lose() -> None:
    drafts = Drafts()
    lost, num_plain = 0.0, 1
    for _ in range(10_000):
        if drafts.allows:
            drafts.verified(4, 0, 1.4)
            drafts.times.note(5, 1.4)
            lost += 0.4
        else:
            drafts.without(1.0)
            num_plain += 1
    assert lost <= START_BALANCE + PLAIN_STEP_GAIN * num_plain + 0.4
    assert lost / 10_000 < 0.0105
    assert drafts.account.speed_up == pytest.approx(1 / (1 + lost / 10_000), rel=0.01)


def test_what_drafts_gain_is_told() -> None:
    drafts = Drafts()
    for _ in range(50):
        drafts.verified(4, 3, 2.0)
        drafts.times.note(5, 2.0)
    assert drafts.allows
    assert drafts.account.speed_up == pytest.approx(2.0, rel=0.03)
    assert (drafts.account.num_drafted, drafts.account.num_accepted) == (200, 150)


def test_gains_of_long_ago_pay_for_no_more_than_a_few_steps() -> None:
    drafts = Drafts()
    for _ in range(100):
        drafts.verified(4, 4, 1.0)
        drafts.times.note(5, 1.0)
    drafts.without(1.0)
    count = 0
    while drafts.allows:
        drafts.verified(4, 0, 2.0)
        drafts.times.note(5, 2.0)
        count += 1
    assert count == MAX_BALANCE


def test_what_is_left_is_what_the_next_step_may_lose() -> None:
    drafts = Drafts()
    drafts.times.note(5, 2.0)
    left = []
    while drafts.allows:
        left.append(drafts.balance.left)
        drafts.verified(4, 0, 2.0)
    assert left == pytest.approx([START_BALANCE + PLAIN_STEP_GAIN, START_BALANCE + PLAIN_STEP_GAIN - 1])
    assert drafts.balance.left == 0


def test_a_step_without_drafts_is_looked_at_again_now_and_then() -> None:
    drafts = Drafts()
    for _ in range(REFRESH):
        assert drafts.allows
        drafts.verified(4, 4, 1.0)
        drafts.times.note(5, 1.0)
    assert not drafts.allows
    drafts.without(3.0)
    assert drafts.allows


def test_a_step_that_others_interrupt_is_not_the_drafts_fault() -> None:
    drafts = Drafts()
    for _ in range(20):
        drafts.verified(4, 2, 1.2)
        drafts.times.note(5, 1.2)
    drafts.verified(4, 2, 1000.0)
    assert drafts.allows


def test_texts_share_what_a_step_gains() -> None:
    drafts = Drafts(num_decodes=16)
    rng = random.Random(4)
    for _ in range(40):
        if drafts.allows:  # one text of 16 gains four tokens, and all wait half as long again
            drafts.verified(4, 4, 1.5 + rng.random() / 10)
            drafts.times.note(20, 1.5)
        else:
            drafts.without(1.0)
    assert not drafts.allows


def test_steps_whose_time_tells_nothing_are_counted() -> None:
    drafts = Drafts()
    drafts.account.count([VerifiedDrafts(7, 5, 2)])
    assert (drafts.account.num_drafted, drafts.account.num_accepted) == (5, 2)
    assert drafts.account.speed_up == 1.0


def test_texts_without_drafts_are_as_fast_as_without() -> None:
    drafts = Drafts()
    for _ in range(50):
        drafts.account.note(1, [], 1.0, drafting_seconds=0.01)
    assert drafts.account.speed_up == 1.0
    drafts.verified(4, 0, 2.0)
    assert drafts.account.speed_up < 1.0


def test_forced_tokens_are_no_guesses_and_lend_them_nothing() -> None:
    drafts = Drafts()
    for _ in range(REFRESH + 1):
        drafts.verified(6, 6, 2.0, num_forced=6)
    assert drafts.account.speed_up == pytest.approx(3.5, rel=0.01)
    assert (drafts.account.num_drafted, drafts.account.num_accepted) == (0, 0)
    assert drafts.allows  # however many such steps there are
    count = 0
    while drafts.allows:
        drafts.verified(4, 0, 2.0)
        drafts.times.note(5, 2.0)
        count += 1
    assert count == 2


def test_guesses_are_judged_beside_forced_tokens() -> None:
    """Of a step's time and tokens, only what goes beyond the forced ones is theirs."""
    drafts = Drafts()
    drafts.times.note(5, 2.0)
    count = 0
    while drafts.allows:
        drafts.verified(4 + 2, 4, 2.5, num_forced=4)  # two guesses took half a step's time, for nothing
        count += 1
    assert count == 4
    assert (drafts.account.num_drafted, drafts.account.num_accepted) == (8, 0)
    right = Drafts()
    right.times.note(5, 2.0)
    for _ in range(20):
        right.verified(4 + 2, 4 + 2, 2.5, num_forced=4)
    assert right.allows


def test_each_proposer_answers_for_its_own_drafts() -> None:
    """One that is never right does not end what another is right about."""
    drafts = Drafts()
    other = drafts.account.open_balance()
    while other.allows:
        drafts.verified(1, 0, 1.1, drafting=0.4, balance=other)
    assert drafts.allows
    for _ in range(20):
        drafts.verified(4, 3, 1.4)
    assert drafts.allows


def test_who_drafts_in_one_step_shares_its_time_by_drafts() -> None:
    drafts = Drafts(num_decodes=2)
    other = drafts.account.open_balance()
    for _ in range(3):  # a step of twice the time gives the first text's proposer three tokens for six, the other none
        drafts.balance.claim([7], 0.0)
        other.claim([8], 0.0)
        drafts.account.note(2, [VerifiedDrafts(7, 3, 3), VerifiedDrafts(8, 3, 0)], 2.0)
    assert drafts.allows
    assert not other.allows
