"""Holds the draft model's state of one sequence."""

from __future__ import annotations

from paged_sdk.kv.manager import KvTable
from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.types.step import StepRow

__all__ = ["DraftState"]


class DraftState(DraftedText):
    """Holds the draft model's state of one sequence.

    :ivar num_computed: number of tokens with KV, drafts included
    :ivar is_prefilling: whether the sequence is still being prefilled in chunks
    :ivar largest_token: the largest token id of the sequence
    """

    __slots__ = ("is_prefilling", "largest_token", "num_computed", "table")

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: FirstPause) -> None:
        super().__init__(sequence, acceptance, first_pause)
        request = sequence.request
        self.table: KvTable = KvTable(request.cache_keys, most_shared=request.most_shared)
        self.num_computed: int = 0
        self.largest_token: int = max(sequence.token_ids)
        self.is_prefilling: bool = False

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
        num_right = self.compare()
        # KV beyond the accepted drafts belongs to rejected tokens. The last token is always computed again, since the
        # next draft needs its logits.
        self.num_computed = min(self.num_computed, known + num_right, len(token_ids) - 1)

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
