"""What drafts may lose."""

from __future__ import annotations

import random

import pytest

from paged_sdk.scheduler.draft_account import MOST, REFRESH, SHARE, START, DraftAccount
from paged_sdk.scheduler.step_times import StepTimes


def account(plain: float = 1.0, num_texts: int = 1) -> tuple[DraftAccount, StepTimes]:
    times = StepTimes()
    drafts = DraftAccount(times)
    drafts.note(num_texts, 0, 0, plain)
    times.note(num_texts, plain)
    return drafts, times


def test_drafts_that_are_never_right_end_after_what_they_may_lose() -> None:
    drafts, times = account()
    lost, num_plain = 0.0, 1
    for _ in range(10_000):
        if drafts.allows:
            drafts.note(1, 4, 0, 1.4)
            times.note(5, 1.4)
            lost += 0.4
        else:
            drafts.note(1, 0, 0, 1.0)
            times.note(1, 1.0)
            num_plain += 1
    assert lost <= START + SHARE * num_plain + 0.4
    assert lost / 10_000 < 0.0105
    assert drafts.speed_up == pytest.approx(1 / (1 + lost / 10_000), rel=0.01)


def test_what_drafts_gain_is_told() -> None:
    drafts, times = account()
    for _ in range(50):
        drafts.note(1, 4, 3, 2.0)
        times.note(5, 2.0)
    assert drafts.allows
    assert drafts.speed_up == pytest.approx(2.0, rel=0.03)
    assert (drafts.num_drafted, drafts.num_accepted) == (200, 150)


def test_gains_of_long_ago_pay_for_no_more_than_a_few_steps() -> None:
    drafts, times = account()
    for _ in range(100):
        drafts.note(1, 4, 4, 1.0)
        times.note(5, 1.0)
    drafts.note(1, 0, 0, 1.0)
    count = 0
    while drafts.allows:
        drafts.note(1, 4, 0, 2.0)
        times.note(5, 2.0)
        count += 1
    assert count == MOST


def test_a_step_without_drafts_is_looked_at_again_now_and_then() -> None:
    drafts, times = account()
    for _ in range(REFRESH):
        assert drafts.allows
        drafts.note(1, 4, 4, 1.0)
        times.note(5, 1.0)
    assert not drafts.allows
    drafts.note(1, 0, 0, 3.0)
    assert drafts.allows


def test_a_step_that_others_interrupt_is_not_the_drafts_fault() -> None:
    drafts, times = account()
    for _ in range(20):
        drafts.note(1, 4, 2, 1.2)
        times.note(5, 1.2)
    drafts.note(1, 4, 2, 1000.0)
    assert drafts.allows


def test_texts_share_what_a_step_gains() -> None:
    drafts, times = account(num_texts=16)
    rng = random.Random(4)
    for _ in range(40):
        if drafts.allows:  # one text of 16 gains four tokens, and all wait half as long again
            drafts.note(16, 4, 4, 1.5 + rng.random() / 10)
            times.note(20, 1.5)
        else:
            drafts.note(16, 0, 0, 1.0)
            times.note(16, 1.0)
    assert not drafts.allows


def test_steps_whose_time_tells_nothing_are_counted() -> None:
    drafts, _ = account()
    drafts.count(5, 2)
    assert (drafts.num_drafted, drafts.num_accepted) == (5, 2)
    assert drafts.speed_up == 1.0


def test_forced_tokens_are_no_guesses_and_lend_them_nothing() -> None:
    drafts, times = account()
    for _ in range(REFRESH + 1):
        drafts.note(1, 6, 6, 2.0, num_forced=6)
    assert drafts.speed_up == pytest.approx(3.5, rel=0.01)
    assert (drafts.num_drafted, drafts.num_accepted) == (0, 0)
    assert drafts.allows  # however many such steps there are
    count = 0
    while drafts.allows:
        drafts.note(1, 4, 0, 2.0)
        times.note(5, 2.0)
        count += 1
    assert count == 2


def test_guesses_are_judged_beside_forced_tokens() -> None:
    """Of a step's time and tokens, only what goes beyond the forced ones is theirs."""
    drafts, times = account()
    times.note(5, 2.0)
    count = 0
    while drafts.allows:
        drafts.note(1, 4 + 2, 4, 2.5, num_forced=4)  # two guesses took half a step's time, for nothing
        count += 1
    assert count == 4
    assert (drafts.num_drafted, drafts.num_accepted) == (8, 0)
    right, times = account()
    times.note(5, 2.0)
    for _ in range(20):
        right.note(1, 4 + 2, 4 + 2, 2.5, num_forced=4)
    assert right.allows
