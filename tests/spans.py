"""Make rows of a step for tests of attention, which do not look at tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paged_sdk.types.step import StepRow

__all__ = ["span"]


def span(
    start: int,
    num_new_tokens: int,
    kv_ids: Sequence[int],
    *,
    seq_id: int | None = None,
    num_prompt_tokens: int | None = None,
) -> StepRow:
    """Make a row of some tokens.

    :param seq_id: by default the id of the sequence's first block, which no other sequence has
    :param num_prompt_tokens: by default several tokens are a prompt's, and one was generated
    """
    if num_prompt_tokens is None:
        num_prompt_tokens = start + num_new_tokens if num_new_tokens > 1 else start
    seq_id = kv_ids[0] if seq_id is None else seq_id
    return StepRow(
        seq_id,
        start,
        [0] * num_new_tokens,
        kv_ids,
        num_prompt_tokens,
        num_logits=num_new_tokens,
        state_slot=kv_ids[0],
    )
