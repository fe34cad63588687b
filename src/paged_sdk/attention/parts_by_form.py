"""Splits the rows of a step for the native kernels, which compute prompts and generated tokens differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.native.paged_attention import MAX_FEW_TOKENS, cumulated
from paged_sdk.types.step import StepRow

__all__ = ["StepParts", "by_form"]


@frozen(eq=False)
class StepParts:
    """Holds the parts of a step's rows.

    :ivar rows: parts, each of prompt tokens or of at most ``MAX_FEW_TOKENS`` generated tokens
    :ivar in_chunks: for each part, whether its tokens are of a prompt
    :ivar bidirectional_from: for each part, the position from which on its tokens see one another bidirectionally, or
        -1 if attention is causal
    :ivar num_generating: the number of the step's rows that have generated tokens
    """

    rows: Sequence[StepRow]
    in_chunks: Sequence[bool]
    bidirectional_from: Sequence[int]
    num_generating: int

    @property
    def marks(self) -> Tensor | None:
        """Return which parts are of prompts, ``[num_parts]`` uint8; None: none is."""
        return torch.tensor(self.in_chunks, dtype=torch.uint8) if any(self.in_chunks) else None

    @property
    def cu_seqlens_read(self) -> Tensor | None:
        """Return the cumulated numbers of tokens whose hidden states are read; None: all are."""
        if not any(row.num_logits < row.num_new_tokens for row in self.rows):
            return None
        return cumulated(torch.tensor([row.num_logits for row in self.rows]))


def by_form(rows: Sequence[StepRow], *, is_bidirectional: bool) -> StepParts:
    """Split rows so that only a token's place in its sequence decides by which kernel it is computed.

    The number of tokens that a step computes must not decide: the last token of a prompt is computed alone if the rest
    is cached, and generated tokens are computed many at a time as drafts or after a preemption.

    :param is_bidirectional: whether attention is bidirectional over the whole sequence
    """
    parts: list[StepRow] = []
    in_chunks: list[bool] = []
    bidirectional_from: list[int] = []
    num_generating = 0
    for row in rows:
        start, end = row.start, row.end
        if start < row.num_prompt_tokens:
            first_generated = min(end, row.num_prompt_tokens)
            whole = (start, first_generated, 0)
            parts_of_row = [whole] if is_bidirectional else _by_image(row, start, first_generated)
            for first, end_of_part, seen_by_all in parts_of_row:
                parts.append(_part(row, first, end_of_part))
                in_chunks.append(True)
                bidirectional_from.append(seen_by_all)
            start = first_generated
        num_generating += start < end
        for first in range(start, end, MAX_FEW_TOKENS):
            parts.append(_part(row, first, min(first + MAX_FEW_TOKENS, end)))
            in_chunks.append(False)
            bidirectional_from.append(-1)
    return StepParts(parts, in_chunks, bidirectional_from, num_generating)


def _by_image(row: StepRow, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split prompt tokens at the start and end of each image whose tokens attend bidirectionally.

    :returns: first and last position (exclusive) of each part, and the first position of its image; -1: no image
    """
    for first, last in () if row.media is None else row.media.whole_spans(start, end):
        if start < first:
            yield start, first, -1
        yield max(start, first), last, first
        start = last
    if start < end:
        yield start, end, -1


def _part(row: StepRow, start: int, end: int) -> StepRow:
    """Return the part of a row at positions ``start`` to ``end`` (exclusive)."""
    if (start, end) == (row.start, row.end):
        return row
    token_ids = row.token_ids[start - row.start : end - row.start]
    num_logits = min(max(row.num_logits - (row.end - end), 0), end - start)
    return StepRow(row.seq_id, start, token_ids, row.kv_ids, row.num_prompt_tokens, row.kv_version, num_logits)
