"""Describe a step as a message of plain Python values, with everything that running the model needs.

The scheduler makes it; runners and attention read it. It refers to nothing that lives in one process, so it can be
pickled and run by another process that holds the same weights and the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from paged_sdk.types.media import PromptMedia

__all__ = ["AWAITED", "Step", "StepRow"]

AWAITED: Final = -1
"""Placeholder for a token that the previous step samples, which so far is only on the device."""


# Not frozen: a frozen class takes three times as long to construct, and a step has one per sequence.
@define
class StepRow:
    """Holds the tokens that one sequence computes in a step.

    :ivar seq_id: identifies the sequence in its engine
    :ivar start: number of the sequence's tokens whose KV is cached already
    :ivar token_ids: the tokens to compute, from position ``start`` on, at least one; drafts come last
    :ivar kv_ids: where the sequence's KV is: the block table, or ``[slot]`` when contiguous
    :ivar num_prompt_tokens: how many tokens of the sequence are its prompt; later ones were generated
    :ivar kv_version: changes when an entry of ``kv_ids`` that will be read has changed; entries added at the end do not
        change it
    :ivar num_logits: number of tokens, counted from the last, whose logits or hidden states are needed; for the others
        a model need compute only their KV
    :ivar num_drafts: how many of the tokens, the last ones, are drafts; the sequence's next row starts after those that
        were right. More than it has tokens: they follow the drafts of the last row, which are drafts still
    :ivar is_long: whether the sequence has outgrown the trained context, so that all its keys use LongRoPE's long
        frequencies
    :ivar adapter: the number of the adapter to apply; None: none
    :ivar adapter_start: the first token of the sequence to which the adapter is applied
    :ivar media: the images of the sequence's prompt; None: it has none
    :ivar state_slot: where the sequence's state in recurrent layers is; models without such layers ignore it
    :ivar second_part: where the second of two texts begins, for models with token types; None: there is one text
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    kv_ids: Sequence[int]
    num_prompt_tokens: int
    kv_version: int = 0
    num_logits: int = 0
    num_drafts: int = 0
    is_long: bool = False
    adapter: int | None = None
    adapter_start: int = 0
    media: PromptMedia | None = None
    state_slot: int = 0
    second_part: int | None = None

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens the sequence computes in the step."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Return how many of the sequence's tokens have KV in the cache after the step."""
        return self.start + len(self.token_ids)


@frozen(kw_only=True)
class Step:
    """Describes one step. The device executes in this order: copies, freeing of released slots, the rows' writes.

    :ivar rows: the sequences with the tokens to compute
    :ivar copies: source, target and number of tokens: whole blocks when paged, otherwise the first tokens of slots
    :ivar state_copies: source and target slot of each state to copy, beside ``copies``
    :ivar released: slots whose storage may be freed (contiguous only)
    :ivar finished_seq_ids: sequences that have ended, whose state may be dropped
    """

    rows: list[StepRow]
    copies: list[tuple[int, int, int]] = field(factory=list)
    state_copies: list[tuple[int, int]] = field(factory=list)
    released: list[int] = field(factory=list)
    finished_seq_ids: list[int] = field(factory=list)
