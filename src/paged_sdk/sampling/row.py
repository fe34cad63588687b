"""Describes what to sample from one row of logits."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from paged_sdk.scheduler.request import Request

__all__ = ["SampleRow"]


# Not frozen, which makes construction three times as slow: a step may make one per sequence.
@define(eq=False)
class SampleRow:
    """Describes one position of one text, whose next token is to be chosen.

    A step may hold several rows of one sequence, in the order of their positions: each then has the tokens of the row
    before it and one more draft.

    :ivar seq_id: identifies the sequence; that of the request's first choice is ``seq_id - choice_index``
    :ivar request: what the sequence belongs to
    :ivar token_ids: the prompt, the output and, where drafts are verified, the drafts up to this position
    :ivar num_tokens: how many tokens there are before the one to choose. On a device there may be one more than
        ``token_ids``, which the host has not seen
    :ivar choice_index: the choice of the first sample; sample j belongs to choice ``choice_index + j``
    :ivar num_samples: how many tokens to choose, each as if it were alone
    :ivar num_drafts: how many drafts of the sequence the step verifies, at this position and at others
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
        """Return how many of the tokens are the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens of output come before the one to choose."""
        return self.num_tokens - len(self.request.prompt_token_ids)
