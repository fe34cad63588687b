"""A step's tokens as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import RowSpan
from paged_sdk.kernels.transfer import to_device
from paged_sdk.runner.overlap import OverlapTokens
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


def make_input_batch(
    scheduled: Sequence[ScheduledSequence], device: torch.device, overlap: OverlapTokens | None = None
) -> InputBatch:
    """Make the input of a step of at least one row.

    :param overlap: the last token of rows that the host does not know all of
    """
    token_ids: list[int] = []
    spans: list[RowSpan] = []
    first_tokens: list[int] = []
    unknown: list[int] = []
    unknown_of: list[int] = []
    for row in scheduled:
        known = row.sequence.token_ids
        first_tokens.append(len(token_ids))
        spans.append(RowSpan(row.start, row.num_new_tokens, row.kv_ids))
        token_ids += known[row.start : row.known_end]
        if row.known_end > len(known):
            unknown.append(len(token_ids))
            unknown_of.append(row.sequence.seq_id)
            token_ids.append(0)
        token_ids += row.draft_token_ids
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    tokens = np.array(token_ids)
    if overlap is None or not unknown:
        on_device, its_positions = to_device(device, tokens, positions)
    else:
        places = np.array(overlap.places(unknown_of))
        on_device, its_positions, targets, sources = to_device(device, tokens, positions, np.array(unknown), places)
        on_device.index_copy_(0, targets, overlap.tokens.index_select(0, sources))
    return InputBatch(token_ids=on_device, positions=its_positions, spans=spans, first_tokens=first_tokens)
