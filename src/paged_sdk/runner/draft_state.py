"""Holds the draft model's state of one sequence."""

from __future__ import annotations

from paged_sdk.constraints.grammar import GrammarState
from paged_sdk.kv.manager import KvTable
from paged_sdk.runner.first_pause import FIRST_PAUSE, LONGEST_PAUSE, FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.types.step import StepRow

__all__ = ["DraftState"]


class DraftState:
    """Holds the draft model's state of one sequence.

    :ivar num_computed: number of tokens with KV, drafts included
    :ivar drafts: the last proposed tokens
    :ivar num_wanted: number of drafts to make
    :ivar is_prefilling: whether the sequence is still being prefilled in chunks
    :ivar largest_token: the largest token id of the sequence
    """

    __slots__ = (
        "_acceptance",
        "_first_pause",
        "_grammar",
        "_num_known",
        "_num_paused",
        "_pause",
        "drafts",
        "is_prefilling",
        "largest_token",
        "num_computed",
        "num_wanted",
        "sequence",
        "table",
    )

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause) -> None:
        request = sequence.request
        self.sequence: Sequence = sequence
        self.table: KvTable = KvTable(request.cache_keys, most_shared=request.most_shared)
        self.num_computed: int = 0
        self.drafts: list[int] = []
        self.largest_token: int = max(sequence.token_ids)
        self.num_wanted: int = 0
        self.is_prefilling: bool = False
        self._grammar: GrammarState | None = None
        self._acceptance = acceptance
        self._num_known = len(sequence.token_ids)
        self._first_pause = first_pause
        self._pause = first_pause.num_steps
        self._num_paused = 0

    @property
    def num_uncomputed(self) -> int:
        """Return the number of tokens without KV, drafts included."""
        return len(self.sequence.token_ids) + len(self.drafts) - self.num_computed

    def take_in(self) -> None:
        """Compare the drafts with the tokens that the sequence has got since, and drop the drafts."""
        token_ids, known = self.sequence.token_ids, self._num_known
        if len(token_ids) == known and not self.drafts and self.num_computed < known:
            return
        self.largest_token = max([self.largest_token, *token_ids[known:]])
        num_right = 0
        for draft, token in zip(self.drafts, token_ids[known:], strict=False):
            self._acceptance.note(0, right=draft == token)
            if draft != token:
                break
            num_right += 1
        # KV beyond the accepted drafts belongs to rejected tokens. The last token is always computed again, since the
        # next draft needs its logits.
        self.num_computed = min(self.num_computed, known + num_right, len(token_ids) - 1)
        self.drafts = []
        self._num_known = len(token_ids)

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
        does a token outside of the target's vocabulary: the draft model may have more logits columns, and on a device
        -1 marks non-finite logits.

        :param vocab_size: vocabulary size of the target
        """
        is_token, grammar = 0 <= token < vocab_size, self._grammar
        if not is_token or (grammar is not None and grammar.num_allowed([*self.drafts, token]) <= len(self.drafts)):
            self.num_wanted = len(self.drafts)
            self._acceptance.note(0, right=False)
        else:
            self.drafts.append(token)

    def chances(self, most: int) -> list[float]:
        """Return the probabilities that the first draft is accepted, the first two are, and so on."""
        rate = self._acceptance.rates[0]
        return [rate**count for count in range(1, most + 1)]

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

    def row(self, num_tokens: int, *, num_logits: int) -> StepRow:
        """Make a step's row of the next tokens without KV. From the sequence's last token on they are drafts: see
        :meth:`take_in`.
        """
        start, sequence = self.num_computed, self.sequence
        num_known = len(sequence.token_ids)
        token_ids = sequence.token_ids[start : start + num_tokens]
        if start + num_tokens > num_known:
            token_ids += self.drafts[max(start - num_known, 0) : start + num_tokens - num_known]
        return StepRow(
            sequence.seq_id,
            start,
            token_ids,
            self.table.ids,
            sequence.num_prompt_tokens,
            self.table.version,
            num_logits,
            max(start + num_tokens - num_known + 1, 0),
            state_slot=self.table.state_slot,
        )
