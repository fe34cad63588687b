"""Proposes drafts from texts: a request's own, a prediction of it, and what the model has said before."""

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
"""Of a prompt, so many tokens are searched, its last."""
INDEXED_PER_STEP: Final = 16_384
"""In one step, the prompts of so many tokens are indexed, which takes 9 ms; other texts wait for theirs without drafts.
One prompt is always indexed."""
TAIL: Final = LENGTHS[0]


class TextProposer:
    """Proposes what followed when a text's last tokens were written before: in a prediction of it, in its prompt and
    output, and in recent texts of the model.

    How many tokens it proposes follows from how often such guesses were right and from what steps take; where nothing
    is to be gained, it proposes none and goes on learning from the tokens that come.

    :param gamma: the most drafts of one text
    :param looks_back: whether texts without a prediction get drafts, from what they and others have said before
    :param shares_texts: whether texts may be guessed from those of other requests with the same cache keys
    :param times: how long steps take
    :param balance: whether drafts have paid so far
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
        """Return of how many sequences it keeps state."""
        return len(self._rows)

    @property
    def rates(self) -> list[float]:
        """Return how likely guesses from a text's own tokens are right, by the kind of evidence."""
        return self._own.rates

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence, as many as should pay."""
        start = time.monotonic()
        found = self._propose(sequences)
        drafted = [sequence.seq_id for sequence, drafts in zip(sequences, found, strict=True) if drafts]
        self._balance.claim(drafted, time.monotonic() - start)
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended, and keep their texts for later ones."""
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None and self._recent is not None and row.sequence.request.shares_prefix:
                self._recent.add(row.sequence.request.cache_keys, row.sequence.output_token_ids)

    def reset(self) -> None:
        """Forget what the model has said before."""
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
            # The token sampled after the last draft belongs to the text, too.
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
    """Holds what is known of one sequence.

    :ivar sequence: the sequence; its tokens are the text
    """

    __slots__ = ("_followers", "_index", "_num_seen", "sequence")

    def __init__(self, sequence: Sequence, index: TokenIndex | None, followers: list[Follower]) -> None:
        self.sequence = sequence
        self._index = index
        self._followers = followers
        self._num_seen = len(sequence.token_ids)
        self._seek()

    def follow(self) -> Follower | None:
        """Take in the tokens that the sequence has got, and return who guesses best what follows them."""
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
        """Let followers that are not sure of their place look for a better one."""
        unsure = [follower for follower in self._followers if not follower.is_sure]
        if unsure:
            tail = self.sequence.token_ids[-TAIL:]
            keys = context_keys(tail)
            for follower in unsure:
                follower.seek(tail, keys)


def _chance(follower: Follower) -> float:
    return follower.chance
