"""Describe a step as a message: what whoever runs the model needs to know of it, in plain Python values.

The scheduler makes it; runners and attention read it. It refers to nothing that lives in one process, so it can be
pickled and run by another one that holds the same weights and the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from paged_sdk.types.media import PromptMedia

__all__ = ["AWAITED", "Step", "StepRow"]

AWAITED: Final = -1
"""Stands for the token that the step before samples for the sequence, which so far only the device knows."""


# Not frozen, because a frozen one takes three times as long to make, and a step makes one for each sequence.
@define
class StepRow:
    """Holds the tokens that one sequence computes in a step.

    :ivar seq_id: identifies the sequence in its engine
    :ivar start: the number of tokens of the sequence whose keys and values are in the cache already
    :ivar token_ids: the tokens to compute, at positions ``start`` and on, at least one; drafts come last
    :ivar kv_ids: where the sequence's keys and values lie: the block table, or ``[slot]`` when contiguous
    :ivar num_prompt_tokens: how many tokens of the sequence are its prompt; those after them were generated
    :ivar kv_version: changes when an entry of ``kv_ids`` that will be read has changed; entries added at the end do not
        change it
    :ivar num_logits: the number of tokens, counted from the last, whose logits or hidden states are needed; of others,
        a model need not compute more than their keys and values
    :ivar is_long: whether the sequence has outgrown the length from which on all its keys are rotated otherwise
    :ivar adapter: the number of the adapter that the tokens go through; None: none
    :ivar adapter_start: the first token of the sequence that goes through it; those before it go through none
    :ivar media: the images of the sequence's prompt; None: it has none
    :ivar second_part: where the second of two texts begins, for a model that tells them apart; None: there is one
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    kv_ids: Sequence[int]
    num_prompt_tokens: int
    kv_version: int = 0
    num_logits: int = 0
    is_long: bool = False
    adapter: int | None = None
    adapter_start: int = 0
    media: PromptMedia | None = None
    second_part: int | None = None

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens the sequence computes in the step."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Return how many of the sequence's tokens have keys and values in the cache after the step."""
        return self.start + len(self.token_ids)


@frozen(kw_only=True)
class Step:
    """Describes one step. The device keeps this order: copies, then released slots may go, then the rows' writes.

    :ivar rows: the sequences and the tokens to compute of each
    :ivar copies: source, target and number of tokens: whole blocks when paged, otherwise the first tokens of slots
    :ivar released: slots whose storage may be dropped (contiguous only)
    :ivar finished_seq_ids: sequences that have ended, whose state may be forgotten
    """

    rows: list[StepRow]
    copies: list[tuple[int, int, int]] = field(factory=list)
    released: list[int] = field(factory=list)
    finished_seq_ids: list[int] = field(factory=list)
