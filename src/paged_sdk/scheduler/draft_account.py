"""Keeps account of what drafts have brought and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["DraftAccount", "DraftBalance", "VerifiedDrafts"]

START: Final = 1.5
"""Drafts may lose so many steps' time before they have to have gained any: a few attempts."""
MOST: Final = 3.0
"""What was gained is remembered up to so many steps' time: a text that drafts suit lends the next one no more. A step
may lose what is left, so none takes more than four times as long as without drafts, and texts that are shown as they
are written do not come in jerks: 16 texts drafted 112 tokens in a step of 0.84 s."""
SHARE: Final = 0.01
"""Each step without drafts allows drafts to lose so much of its time later. With what choosing them takes, speculation
costs less than 2 %."""
LATE: Final = 2.0
"""A step that takes this times as long as expected was interrupted: what is beyond is not the drafts' fault."""
REFRESH: Final = 128
"""Of so many steps with drafts one goes without, so that what they are compared with is not long past. It loses what
the drafts gain in one step."""


class VerifiedDrafts(NamedTuple):
    """Holds what came of the drafts of one text in a step.

    :ivar seq_id: the id of the text's sequence
    :ivar num_drafts: how many were verified
    :ivar num_accepted: how many of these were right
    :ivar num_forced: how many of the right ones a constraint left no choice in: such a draft is no guess
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
        """Return how many of the guesses were right."""
        return self.num_accepted - self.num_forced


class DraftAccount:
    """Keeps account of the time that drafts have gained and lost.

    A step with drafts takes longer and gives more tokens. Had these come one by one, they would have taken as many
    steps without drafts, the time of which is known: the difference is gained or lost. Each proposer answers for its
    own drafts with a balance.

    :param times: how long steps take
    :ivar num_drafted: how many drafts were verified
    :ivar num_accepted: how many of them were right
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
        """Return a balance for one more proposer."""
        balance = DraftBalance(self)
        self._balances.append(balance)
        return balance

    def start_anew(self) -> None:
        """Let every proposer begin as if no drafts had been made yet; what is counted stays."""
        self._num_since_plain = 0
        for balance in self._balances:
            balance.start_anew()

    @property
    def needs_step_without(self) -> bool:
        """Say whether the next step must have no drafts, to see how long such a step takes now."""
        return self._num_since_plain >= REFRESH

    @property
    def speed_up(self) -> float:
        """Return how many times as long the generation of all texts so far would have taken without drafts; 1 if there
        were none, however long it took to ask for them.
        """
        return self._seconds_without / self._seconds if self._has_verified and self._seconds > 0 else 1.0

    def count(self, verified: Iterable[VerifiedDrafts]) -> None:
        """Count drafts of a step whose time says nothing of them."""
        for each in verified:
            self.num_drafted += each.num_guesses
            self.num_accepted += each.num_right
        for balance in self._balances:
            balance.claim((), 0.0)

    def note(
        self, num_texts: int, verified: Sequence[VerifiedDrafts], seconds: float, drafting_seconds: float = 0.0
    ) -> None:
        """Take in a step without prompts, before its time is noted.

        :param num_texts: how many texts it gave a token
        :param verified: the texts that had drafts
        :param seconds: how long it took, without making the drafts
        :param drafting_seconds: how long that took
        """
        self._seconds += seconds + drafting_seconds
        self._note(num_texts, verified, seconds)
        self.count(verified)

    def _note(self, num_texts: int, verified: Sequence[VerifiedDrafts], seconds: float) -> None:
        if not verified:
            if self.needs_step_without:
                self._times.forget(num_texts)
            self._seconds_without += seconds
            self._num_since_plain = 0
            for balance in self._balances:
                balance.add(SHARE)
            return
        self._has_verified = True
        num_drafts = sum(each.num_drafts for each in verified)
        num_forced = sum(each.num_forced for each in verified)
        num_guesses = num_drafts - num_forced
        self._num_since_plain += num_guesses > 0
        plain = self._times.nearest(num_texts)
        if not plain:  # a clock may be too coarse to see a step
            self._seconds_without += seconds
            return
        self._seconds_without += (1 + sum(each.num_accepted for each in verified) / num_texts) * plain
        if not num_guesses:
            return
        spent = min(seconds, LATE * max(self._times.expected(num_texts + num_drafts), plain))
        without = min(max(self._times.expected(num_texts + num_forced), plain), spent) if num_forced else plain
        for balance in self._balances:
            own = [each for each in verified if each.seq_id in balance.seq_ids]
            num_own = sum(each.num_guesses for each in own)
            if not num_own:
                balance.add(SHARE)
                continue
            # No draft takes a smaller model as long as a step: what is beyond went into reading a text for the first
            # time.
            drafting = min(balance.drafting_seconds, num_own * plain)
            lost = (spent - without) * num_own / num_guesses + drafting
            balance.add(sum(each.num_right for each in own) / num_texts - lost / plain)


class DraftBalance:
    """Tells what one proposer's drafts may lose. While they have lost more than allowed, texts go on without them,
    whatever is expected of them; and no step has so many that it could lose more than is left. The drafts of others are
    not touched.

    :ivar seq_ids: the sequences of which the proposer's drafts are verified next
    :ivar drafting_seconds: how long it took to make these
    """

    def __init__(self, account: DraftAccount) -> None:
        self.seq_ids: frozenset[int] = frozenset()
        self.drafting_seconds: float = 0.0
        self._account = account
        self._left = START

    @property
    def left(self) -> float:
        """Return how much longer the next step may take with drafts of this proposer, in steps without."""
        return 0.0 if self._account.needs_step_without else max(self._left, 0.0)

    @property
    def allows(self) -> bool:
        """Say whether the next step may have drafts of this proposer."""
        return self.left > 0

    def start_anew(self) -> None:
        """Forget what drafts have gained and lost."""
        self._left = START

    def claim(self, seq_ids: Iterable[int], drafting_seconds: float) -> None:
        """Answer for drafts that the next step may verify.

        :param seq_ids: the sequences that have them
        :param drafting_seconds: how long it took to make them
        """
        self.seq_ids = frozenset(seq_ids)
        self.drafting_seconds = drafting_seconds

    def add(self, gained: float) -> None:
        """Add what drafts have gained, in steps; it is negative where they have lost time."""
        self._left = min(self._left + gained, MOST)
