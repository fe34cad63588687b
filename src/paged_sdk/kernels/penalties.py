"""Applies repetition, frequency and presence penalties on the device, which knows the latest tokens before the host.

Occurrences are counted in a table ``[num_seats, V]`` int32 with one row per sequence: twice the number of occurrences
in the output, plus 1 if the token occurs in the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.fallback import device_of, runs_on_triton
from paged_sdk.kernels.penalty_settings import PenaltySettings

__all__ = ["count", "count_reference", "penalize", "penalize_reference"]


def penalize(logits: Tensor, occurrences: Tensor, settings: PenaltySettings) -> None:
    """Penalize tokens that have occurred, in place: first for repetition, then by frequency and presence.

    :param logits: ``[N, V]`` float32, columns adjacent
    :param occurrences: ``[num_seats, V]`` int32, contiguous
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    check_tensor("logits", logits, ("N", "V"), (torch.float32,), logits.device)
    check_tensor("occurrences", occurrences, ("num_seats", logits.shape[1]), (torch.int32,), logits.device)
    settings.check(len(logits), logits.device)
    if runs_on_triton("penalize", logits):
        from paged_sdk.kernels.triton import penalties as triton_kernels

        with device_of(logits):
            triton_kernels.penalize(logits, occurrences, settings)
    else:
        penalize_reference(logits, occurrences, settings)


def count(occurrences: Tensor, settings: PenaltySettings, tokens: Tensor) -> None:
    """Count the token that each row has just sampled, in place.

    :param occurrences: ``[num_seats, V]`` int32, contiguous
    :param tokens: ``[N]`` int64; negative: none
    :raises ConfigError: shapes, dtypes or devices do not fit
    """
    check_tensor("occurrences", occurrences, ("num_seats", "V"), (torch.int32,), tokens.device)
    check_tensor("tokens", tokens, ("N",), (torch.int64,), tokens.device)
    settings.check(len(tokens), tokens.device)
    if runs_on_triton("count", tokens):
        from paged_sdk.kernels.triton import penalties as triton_kernels

        with device_of(tokens):
            triton_kernels.count(occurrences, settings, tokens)
    else:
        count_reference(occurrences, settings, tokens)


def penalize_reference(logits: Tensor, occurrences: Tensor, settings: PenaltySettings) -> None:
    """Implement :func:`penalize` with torch operations."""
    counted = occurrences[settings.seats.clamp(min=0)].where(settings.seats[:, None] >= 0, 0)
    in_output = counted >> 1
    repetition, frequency, presence = (
        each[:, None] for each in (settings.repetition, settings.frequency, settings.presence)
    )
    scores = torch.where(logits < 0, logits * repetition, logits / repetition)
    scores = scores - (frequency * in_output + presence * (in_output > 0))
    logits.copy_(torch.where(counted > 0, scores, logits))


def count_reference(occurrences: Tensor, settings: PenaltySettings, tokens: Tensor) -> None:
    """Implement :func:`count` with torch operations; waits for the device."""
    counts = (settings.seats >= 0) & (tokens >= 0)
    occurrences[settings.seats[counts], tokens[counts]] += 2
