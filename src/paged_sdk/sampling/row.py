"""Describes what to sample from one row of logits."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from paged_sdk.scheduler.request import Request

__all__ = ["SampleRow"]


# Not frozen: that would make construction three times as slow, and a step may make one row per sequence.
@define(eq=False)
class SampleRow:
    """Describes one position of a sequence at which a token is to be chosen.

    A step may hold several rows of one sequence, in the order of their positions, to verify drafts: each position is
    one draft further than that before it.

    :ivar seq_id: identifies the sequence; the sequence of the request's first choice has ``seq_id - choice_index``
    :ivar request: the request that the sequence belongs to
    :ivar token_ids: the prompt, the output and, where drafts are verified, all drafts of the sequence: its rows may
        share one list, which must not be changed
    :ivar num_tokens: number of tokens before the one to choose: the first ones of ``token_ids``. On a device it may be
        one more than ``token_ids`` has: a token that the host has not seen yet
    :ivar choice_index: the choice of the first sample; sample j belongs to choice ``choice_index + j``
    :ivar num_samples: number of tokens to sample independently at this position
    :ivar num_drafts: number of drafts of the sequence that the step verifies, over all its positions
    """

    seq_id: int
    request: Request
    token_ids: Sequence[int]
    num_tokens: int
    choice_index: int = 0
    num_samples: int = 1
    num_drafts: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens before the one to choose."""
        return self.num_tokens - len(self.request.prompt_token_ids)
