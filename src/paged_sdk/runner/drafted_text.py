"""Holds what a model that drafts knows of one sequence: the drafts, and how many to make."""

from __future__ import annotations

from paged_sdk.constraints.grammar import GrammarState
from paged_sdk.runner.first_pause import FIRST_PAUSE, LONGEST_PAUSE, FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance

__all__ = ["DraftedText"]


class DraftedText:
    """Holds a sequence's drafts, and decides how many to make.

    :param acceptance: estimates how likely drafts are accepted, by their place: the last of its kinds is that of all
        later places
    :ivar drafts: the last proposed tokens
    :ivar num_wanted: number of drafts to make
    """

    __slots__ = (
        "_acceptance",
        "_first_pause",
        "_grammar",
        "_num_known",
        "_num_paused",
        "_pause",
        "drafts",
        "num_wanted",
        "sequence",
    )

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause) -> None:
        self.sequence: Sequence = sequence
        self.drafts: list[int] = []
        self.num_wanted: int = 0
        self._grammar: GrammarState | None = None
        self._acceptance = acceptance
        self._num_known = len(sequence.token_ids)
        self._first_pause = first_pause
        self._pause = first_pause.num_steps
        self._num_paused = 0

    def compare(self) -> int:
        """Compare the drafts with the tokens that the sequence has got since, drop the drafts, and return how many of
        them were right.
        """
        token_ids, num_right = self.sequence.token_ids, 0
        for place, (draft, token) in enumerate(zip(self.drafts, token_ids[self._num_known :], strict=False)):
            self._acceptance.note(self._kind(place), right=draft == token)
            if draft != token:
                break
            num_right += 1
        self.drafts = []
        self._num_known = len(token_ids)
        return num_right

    def follow_grammar(self) -> None:
        """Advance the request's constraint, if any, to the end of the sequence."""
        sequence = self.sequence
        if sequence.request.grammar is None:
            return
        text = self._grammar
        if text is None:
            text = self._grammar = sequence.request.grammar.begin((), 0)
        text.tokens += sequence.token_ids[sequence.num_prompt_tokens + len(text.tokens) :]
        text.move_to(sequence.num_output_tokens)

    def add(self, token: int, vocab_size: int) -> None:
        """Append the next draft. A token that the constraint forbids counts as a rejected draft and ends drafting. So
        does a token outside of the target's vocabulary: the draft model may have more logits columns, and -1 marks
        non-finite logits.

        :param vocab_size: vocabulary size of the target
        """
        is_token, grammar = 0 <= token < vocab_size, self._grammar
        if not is_token or (grammar is not None and grammar.num_allowed([*self.drafts, token]) <= len(self.drafts)):
            self.num_wanted = len(self.drafts)
            self._acceptance.note(self._kind(len(self.drafts)), right=False)
        else:
            self.drafts.append(token)

    def chances(self, most: int) -> list[float]:
        """Return the probabilities that the first draft is accepted, the first two are, and so on."""
        chance, found = 1.0, []
        for place in range(most):
            chance *= self._acceptance.rates[self._kind(place)]
            found.append(chance)
        return found

    def choose(self, count: int) -> int:
        """Set the number of drafts to make and return it; if none pays, this is 1 after each pause, as a trial."""
        if count:
            self._pause, self._num_paused = FIRST_PAUSE, 0
            self._first_pause.num_steps = FIRST_PAUSE
        else:
            self._num_paused += 1
            if self._num_paused >= self._pause:
                self._pause, self._num_paused, count = min(2 * self._pause, LONGEST_PAUSE), 0, 1
                self._first_pause.num_steps = max(self._first_pause.num_steps, self._pause)
        self.num_wanted = count
        return count

    def _kind(self, place: int) -> int:
        return min(place, len(self._acceptance.rates) - 1)
