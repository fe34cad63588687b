"""A step's tokens as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import RowSpan
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["InputBatch", "make_input_batch"]


@frozen(kw_only=True)
class InputBatch:
    """The tokens of all rows, one row after the other.

    :ivar token_ids: ``[num_tokens]`` int64
    :ivar positions: ``[num_tokens]`` int64, of each token within its sequence
    :ivar spans: per row: which of its sequence's tokens these are, and where their KV lies
    :ivar first_tokens: per row: the index of its first token
    """

    token_ids: Tensor
    positions: Tensor
    spans: list[RowSpan]
    first_tokens: list[int]


def make_input_batch(scheduled: Sequence[ScheduledSequence], device: torch.device) -> InputBatch:
    """Make the input of a step of at least one row."""
    token_ids: list[int] = []
    spans: list[RowSpan] = []
    first_tokens: list[int] = []
    for row in scheduled:
        span = RowSpan(row.start, row.num_new_tokens, row.kv_ids)
        first_tokens.append(len(token_ids))
        spans.append(span)
        token_ids += row.sequence.token_ids[span.start : span.end]
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    return InputBatch(
        token_ids=torch.tensor(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        spans=spans,
        first_tokens=first_tokens,
    )
