"""Accounts for the time that drafts gain and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["DraftAccount", "DraftBalance", "VerifiedDrafts"]

START_BALANCE: Final = 1.5
"""What drafts may lose before they have gained anything, in times of a step without drafts: a few attempts."""
MAX_BALANCE: Final = 3.0
"""Most gain that is kept, in times of a step without drafts, so that one text that suits drafts does not let the next
one lose much. One step may lose all that is left: none takes more than four times as long as without drafts, so that
streams do not stutter. Without the limit, 16 sequences drafted 112 tokens in a step of 0.84 s."""
PLAIN_STEP_GAIN: Final = 0.01
"""Each step without drafts lets drafts lose this fraction of its time later. Together with the time for choosing
drafts, speculation costs less than 2 %."""
MAX_DELAY_RATIO: Final = 2.0
"""A step's time counts up to this multiple of its expected time; anything beyond is an interruption, not the cost of
drafts."""
REFRESH: Final = 128
"""After this many steps with drafts, one runs without them, so that the time that drafts are compared with stays
current. That costs what drafts gain in one step."""


class VerifiedDrafts(NamedTuple):
    """Holds the outcome of one sequence's drafts in a step.

    :ivar seq_id: the id of the sequence
    :ivar num_drafts: how many drafts were verified
    :ivar num_accepted: how many of these were accepted
    :ivar num_forced: how many of the accepted drafts were the only token that a constraint allowed: these are no
        guesses
    """

    seq_id: int
    num_drafts: int
    num_accepted: int
    num_forced: int = 0

    @property
    def num_guesses(self) -> int:
        """Return how many of the drafts were guesses."""
        return self.num_drafts - self.num_forced

    @property
    def num_right(self) -> int:
        """Return how many of the guesses were accepted."""
        return self.num_accepted - self.num_forced


class DraftAccount:
    """Accounts for the time that drafts have gained and lost.

    A step with drafts takes longer and yields more tokens. The time that as many steps without drafts would have taken
    is known: the difference is the gain or loss. Each proposer has a balance for its own drafts.

    :param times: how long steps without prompts take
    :ivar num_drafted: how many guesses were verified
    :ivar num_accepted: how many of the guesses were accepted
    """

    def __init__(self, times: StepTimes) -> None:
        self.num_drafted: int = 0
        self.num_accepted: int = 0
        self._times = times
        self._balances: list[DraftBalance] = []
        self._seconds = 0.0
        self._seconds_without = 0.0
        self._has_verified = False
        self._num_since_plain = 0

    def open_balance(self) -> DraftBalance:
        """Return a balance for another proposer."""
        balance = DraftBalance(self)
        self._balances.append(balance)
        return balance

    def start_anew(self) -> None:
        """Reset every proposer's balance; the counts are kept."""
        self._num_since_plain = 0
        for balance in self._balances:
            balance.start_anew()

    @property
    def needs_step_without(self) -> bool:
        """Return whether the next step must have no drafts, to measure how long such a step takes now."""
        return self._num_since_plain >= REFRESH

    @property
    def speed_up(self) -> float:
        """Return the estimated time of all decoding without drafts, divided by its actual time; 1 if no draft was ever
        verified, however long proposing took.
        """
        return self._seconds_without / self._seconds if self._has_verified and self._seconds > 0 else 1.0

    def count(self, verified: Iterable[VerifiedDrafts]) -> None:
        """Count the drafts of a step whose time does not show what they cost."""
        for each in verified:
            self.num_drafted += each.num_guesses
            self.num_accepted += each.num_right
        for balance in self._balances:
            balance.claim((), 0.0)

    def note(
        self, num_decodes: int, verified: Sequence[VerifiedDrafts], seconds: float, drafting_seconds: float = 0.0
    ) -> None:
        """Account for a step without prompts. To be called before its time is added to ``times``.

        :param num_decodes: how many sequences decoded
        :param verified: the sequences that had drafts
        :param seconds: how long the step took, without proposing the drafts
        :param drafting_seconds: how long proposing them took
        """
        self._seconds += seconds + drafting_seconds
        self._note(num_decodes, verified, seconds)
        self.count(verified)

    def _note(self, num_decodes: int, verified: Sequence[VerifiedDrafts], seconds: float) -> None:
        if not verified:
            if self.needs_step_without:
                self._times.forget(num_decodes)
            self._seconds_without += seconds
            self._num_since_plain = 0
            for balance in self._balances:
                balance.add(PLAIN_STEP_GAIN)
            return
        self._has_verified = True
        num_drafts = sum(each.num_drafts for each in verified)
        num_forced = sum(each.num_forced for each in verified)
        num_guesses = num_drafts - num_forced
        self._num_since_plain += num_guesses > 0
        plain = self._times.nearest(num_decodes)
        if not plain:  # unknown, or 0 by a coarse clock
            self._seconds_without += seconds
            return
        self._seconds_without += (1 + sum(each.num_accepted for each in verified) / num_decodes) * plain
        if not num_guesses:
            return
        spent = min(seconds, MAX_DELAY_RATIO * max(self._times.expected(num_decodes + num_drafts), plain))
        without = min(max(self._times.expected(num_decodes + num_forced), plain), spent) if num_forced else plain
        for balance in self._balances:
            own = [each for each in verified if each.seq_id in balance.seq_ids]
            num_own = sum(each.num_guesses for each in own)
            if not num_own:
                balance.add(PLAIN_STEP_GAIN)
                continue
            # A draft model takes less than one step per draft: anything beyond was its prefill of a new sequence.
            drafting = min(balance.drafting_seconds, num_own * plain)
            lost = (spent - without) * num_own / num_guesses + drafting
            balance.add(sum(each.num_right for each in own) / num_decodes - lost / plain)


class DraftBalance:
    """Limits how much time one proposer's drafts may lose. While they have lost more than allowed, sequences decode
    without them, whatever acceptance is expected; and no step has so many drafts that it could lose more than is left.
    Other proposers' drafts are not affected.

    :ivar seq_ids: the sequences whose drafts of this proposer are verified next
    :ivar drafting_seconds: how long proposing these drafts took
    """

    def __init__(self, account: DraftAccount) -> None:
        self.seq_ids: frozenset[int] = frozenset()
        self.drafting_seconds: float = 0.0
        self._account = account
        self._left = START_BALANCE

    @property
    def left(self) -> float:
        """Return how much longer the next step may take because of this proposer's drafts, in times of a step without
        drafts.
        """
        return 0.0 if self._account.needs_step_without else max(self._left, 0.0)

    @property
    def allows(self) -> bool:
        """Return whether the next step may have drafts of this proposer."""
        return self.left > 0

    def start_anew(self) -> None:
        """Forget gains and losses."""
        self._left = START_BALANCE

    def claim(self, seq_ids: Iterable[int], drafting_seconds: float) -> None:
        """Record which drafts of this proposer the next step may verify.

        :param seq_ids: the sequences that have them
        :param drafting_seconds: how long proposing them took
        """
        self.seq_ids = frozenset(seq_ids)
        self.drafting_seconds = drafting_seconds

    def add(self, gained: float) -> None:
        """Add a gain, in times of a step without drafts; negative for a loss."""
        self._left = min(self._left + gained, MAX_BALANCE)
