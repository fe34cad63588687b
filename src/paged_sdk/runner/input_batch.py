"""Makes the input tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.paged import new_positions
from paged_sdk.kernels.placement import moved_to
from paged_sdk.kernels.transfer import to_device
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.types.step import AWAITED, StepRow

__all__ = ["InputBatch", "make_input_batch", "token_parts"]


@frozen(kw_only=True)
class InputBatch:
    """Holds the tokens of all rows, concatenated.

    :ivar token_ids: ``[num_tokens]`` int64
    :ivar positions: ``[num_tokens]`` int64, the position of each token in its sequence; ``[3, num_tokens]`` if a
        sequence has images with three-dimensional positions
    :ivar first_tokens: the index of each row's first token
    :ivar is_long: ``[num_tokens]`` bool; see :class:`~paged_sdk.kernels.step.StepContext`
    """

    token_ids: Tensor
    positions: Tensor
    first_tokens: list[int]
    is_long: Tensor | None = None


def make_input_batch(rows: Sequence[StepRow], device: torch.device, overlap: OverlapTokens | None = None) -> InputBatch:
    """Make the input of a step of at least one row.

    :param overlap: holds tokens of the previous step that the host does not know yet; None: the host knows all tokens
    """
    token_ids: list[int] = []
    first_tokens: list[int] = []
    awaited: list[int] = []
    awaited_of: list[int] = []
    any_long = False
    for row in rows:
        any_long = any_long or row.is_long
        first_tokens.append(len(token_ids))
        token_ids += row.token_ids
        # Steps that overlap have no drafts, so only the row's last token may be unknown to the host.
        if token_ids[-1] == AWAITED:
            awaited.append(len(token_ids) - 1)
            awaited_of.append(row.seq_id)
    positions = _positions(rows)
    tokens = np.array(token_ids)
    if not awaited:
        on_device, its_positions = to_device(device, tokens, positions)
    else:
        assert overlap is not None, "a runner without overlap knows every token"
        places = np.array(overlap.places(awaited_of))
        on_device, its_positions, targets, sources = to_device(device, tokens, positions, np.array(awaited), places)
        # The sampled tokens are on the logits' device, which may differ from the embeddings' device.
        on_device.index_copy_(0, targets, moved_to(overlap.tokens, device).index_select(0, sources))
    is_long = _is_long(rows, device) if any_long else None
    return InputBatch(token_ids=on_device, positions=its_positions, first_tokens=first_tokens, is_long=is_long)


def _positions(rows: Sequence[StepRow]) -> npt.NDArray[np.int64]:
    if all(row.media is None or row.media.positions is None for row in rows):
        return new_positions(rows)
    return np.concatenate(
        [
            np.tile(np.arange(row.start, row.end), (3, 1))
            if row.media is None or row.media.positions is None
            else row.media.positions_at(row.start, row.end)
            for row in rows
        ],
        axis=1,
    )


def _is_long(rows: Sequence[StepRow], device: torch.device) -> Tensor:
    values = np.repeat([row.is_long for row in rows], [row.num_new_tokens for row in rows])
    (on_device,) = to_device(device, values.astype(np.int64))
    return on_device.bool()


def token_parts(rows: Sequence[StepRow], device: torch.device) -> Tensor | None:
    """Return for each token whether it belongs to the second text of a pair; None if there are no pairs. See
    :class:`~paged_sdk.kernels.step.StepContext`.
    """
    if all(row.second_part is None for row in rows):
        return None
    values = [
        np.arange(row.start, row.end) >= (row.end if row.second_part is None else row.second_part) for row in rows
    ]
    (on_device,) = to_device(device, np.concatenate(values).astype(np.int64))
    return on_device
