"""Proposes drafts from texts: a sequence's own tokens, a prediction, and the model's recent outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Texts
from typing import Final

from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.acceptance import Acceptance, TextAcceptance
from paged_sdk.speculative.draft_counts import draft_counts
from paged_sdk.speculative.follower import Follower
from paged_sdk.speculative.prediction import follow_prediction
from paged_sdk.speculative.recent_texts import RecentTexts
from paged_sdk.speculative.token_index import LENGTHS, TokenIndex, context_keys

__all__ = ["TextProposer"]

MOST_INDEXED: Final = 32_768
"""Most tokens of a prompt that are searched, its last ones."""
INDEXED_PER_STEP: Final = 16_384
"""Most tokens of new sequences that are indexed per step, which takes 9 ms; the other new sequences get no drafts until
their turn. At least one sequence is indexed, however long."""
TAIL: Final = LENGTHS[0]


class TextProposer:
    """Proposes the tokens that followed earlier occurrences of a sequence's last tokens: in a prediction, in the
    sequence's prompt and output, and in the model's recent outputs.

    The number of drafts follows from acceptance rates and step times. Where drafts do not pay, none are proposed, and
    the rates are still learned from the tokens sampled.

    :param gamma: most drafts of one sequence
    :param looks_back: whether sequences without a prediction get drafts, from their own and recent tokens
    :param shares_texts: whether drafts may come from outputs of other requests with the same cache keys
    :param times: estimates how long steps take
    :param balance: accounts for the time that drafts have gained and lost so far
    """

    def __init__(
        self, gamma: int, *, looks_back: bool, shares_texts: bool, times: StepTimes, balance: DraftBalance
    ) -> None:
        self._gamma = gamma
        self._times = times
        self._balance = balance
        self._looks_back = looks_back
        self._own = Acceptance()
        self._predictions = Acceptance()
        self._others = Acceptance()
        self._recent = RecentTexts() if shares_texts and looks_back else None
        self._rows: dict[int, _Row] = {}

    @property
    def num_followed(self) -> int:
        """Return the number of sequences with state."""
        return len(self._rows)

    @property
    def rates(self) -> list[float]:
        """Return the acceptance rates of drafts from a sequence's own tokens, by kind of evidence."""
        return self._own.rates

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence, as many as are expected to pay."""
        start = time.monotonic()
        found = self._propose(sequences)
        drafted = [sequence.seq_id for sequence, drafts in zip(sequences, found, strict=True) if drafts]
        self._balance.claim(drafted, time.monotonic() - start)
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended, and keep their outputs as a source of drafts."""
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None and self._recent is not None and row.sequence.request.shares_prefix:
                self._recent.add(row.sequence.request.cache_keys, row.sequence.output_token_ids)

    def reset(self) -> None:
        """Forget the model's recent outputs."""
        self._recent = self._recent and RecentTexts()

    def _propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        if not (self._looks_back or any(each.request.prediction_token_ids for each in sequences)):
            return [[] for _ in sequences]
        chosen: list[Follower | None] = []
        chances: list[list[float]] = []
        num_indexed = 0
        for sequence in sequences:
            row = self._rows.get(sequence.seq_id)
            if row is None:
                num_tokens = len(sequence.request.prediction_token_ids)
                if self._looks_back:
                    num_tokens += min(len(sequence.token_ids), MOST_INDEXED)
                if not num_tokens or (num_indexed and num_indexed + num_tokens > INDEXED_PER_STEP):
                    chosen.append(None)
                    chances.append([])
                    continue
                num_indexed += num_tokens
                row = self._rows[sequence.seq_id] = self._begin(sequence)
            best = row.follow()
            # One token fewer than fit: the token sampled after the last draft is kept too.
            most = min(self._gamma, sequence.max_length - len(sequence.token_ids) - 1)
            chosen.append(best)
            chances.append([] if best is None else best.chances(most))
        if not self._balance.allows:
            return [[] for _ in sequences]
        counts = draft_counts(chances, self._times.expected, self._balance.left)
        return [
            follower.guesses(count) if follower is not None and count else []
            for follower, count in zip(chosen, counts, strict=True)
        ]

    def _begin(self, sequence: Sequence) -> _Row:
        request, index = sequence.request, None
        followers: list[Follower] = []
        if request.prediction_token_ids:
            follower = follow_prediction(request.prediction_token_ids, TextAcceptance(self._predictions))
            for token in sequence.output_token_ids:
                follower.advance(token)
            followers.append(follower)
        if self._looks_back:
            index = TokenIndex(sequence.token_ids, max(len(sequence.token_ids) - MOST_INDEXED, 0))
            followers.append(Follower(index, TextAcceptance(self._own), is_own=True))
        recent = self._recent.of(request.cache_keys) if self._recent is not None and request.shares_prefix else None
        if recent is not None:
            followers.append(Follower(recent, TextAcceptance(self._others), is_own=False))
        return _Row(sequence, index, followers)


class _Row:
    """Holds the followers of one sequence."""

    __slots__ = ("_followers", "_index", "_num_seen", "sequence")

    def __init__(self, sequence: Sequence, index: TokenIndex | None, followers: list[Follower]) -> None:
        self.sequence = sequence
        self._index = index
        self._followers = followers
        self._num_seen = len(sequence.token_ids)
        self._seek()

    def follow(self) -> Follower | None:
        """Advance by the sequence's new tokens, and return the follower with the likeliest guess; None: no guess."""
        token_ids = self.sequence.token_ids
        if len(token_ids) > self._num_seen:
            if self._index is not None:
                self._index.grow()
            for token in token_ids[self._num_seen :]:
                for follower in self._followers:
                    follower.advance(token)
            self._num_seen = len(token_ids)
            self._seek()
        best = max(self._followers, key=_chance)
        return best if best.chance > 0 else None

    def _seek(self) -> None:
        """Make followers that are not sure of their place look for a better one."""
        unsure = [follower for follower in self._followers if not follower.is_sure]
        if unsure:
            tail = self.sequence.token_ids[-TAIL:]
            keys = context_keys(tail)
            for follower in unsure:
                follower.seek(tail, keys)


def _chance(follower: Follower) -> float:
    return follower.chance
