"""Penalizes tokens that have occurred, in one launch over tiles of all rows, and counts sampled tokens in another."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from paged_sdk.kernels.penalty_settings import PenaltySettings

__all__ = ["count", "penalize"]

_TILE: Final = 4096


def penalize(logits: Tensor, occurrences: Tensor, settings: PenaltySettings) -> None:
    """See :func:`paged_sdk.kernels.penalties.penalize`; settings must be contiguous."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        _penalize_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
            logits,
            occurrences,
            settings.seats,
            settings.repetition,
            settings.frequency,
            settings.presence,
            logits.stride(0),
            vocab_size,
            block=_TILE,
            num_warps=4,
        )


def count(occurrences: Tensor, settings: PenaltySettings, tokens: Tensor) -> None:
    """See :func:`paged_sdk.kernels.penalties.count`; settings and tokens must be contiguous."""
    num_rows = len(tokens)
    if num_rows:
        _count_kernel[(num_rows,)](occurrences, settings.seats, tokens, occurrences.shape[1], num_warps=1)


@triton.jit
def _penalize_kernel(
    logits_ptr: tl.tensor,
    occurrences_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats_ptr + row)
    if seat >= 0:
        token = tl.program_id(1) * block + tl.arange(0, block)
        counted = tl.load(occurrences_ptr + seat * vocab_size + token, mask=token < vocab_size, other=0)
        # Most tokens have not occurred: their logits are neither read nor written.
        occurs = counted > 0
        logits = tl.load(logits_ptr + row * stride + token, mask=occurs, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        scores = tl.where(logits < 0, logits * repetition, logits / repetition)
        in_output = counted >> 1
        lost = tl.load(frequency_ptr + row) * in_output + tl.where(in_output > 0, tl.load(presence_ptr + row), 0.0)
        tl.store(logits_ptr + row * stride + token, scores - lost, mask=occurs)


@triton.jit
def _count_kernel(
    occurrences_ptr: tl.tensor, seats_ptr: tl.tensor, tokens_ptr: tl.tensor, vocab_size: tl.tensor
) -> None:
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    token = tl.load(tokens_ptr + row)
    if (seat >= 0) & (token >= 0):
        place = occurrences_ptr + seat * vocab_size + token
        tl.store(place, tl.load(place) + 2)
