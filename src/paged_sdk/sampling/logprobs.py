"""Computes logprobs of raw logits on the host: natively, or by torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paged_sdk.kernels.native.library import load
from paged_sdk.kernels.native.logprobs import NativeLogprobs
from paged_sdk.sampling.native_logprobs import NativeLogprobTable
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.torch_logprobs import TorchLogprobTable

__all__ = ["LogprobTable", "MakeLogprobTable", "make_logprob_tables"]


class LogprobTable(Protocol):
    """Holds the logprobs of raw logits, which processors then change in place.

    They depend on their own row alone, and are the same in every implementation, but for rounding.
    """

    def entries(self, rows: Sequence[int], tokens: Sequence[int]) -> list[RawLogprobs]:
        """Make one entry per pair of a row and a token chosen for it. Call this once.

        An entry lists the row's likeliest tokens in the order of falling logits, equal ones by rising id. Among tokens
        that tie for the last place, any may be the ones left out.
        """
        ...


class MakeLogprobTable(Protocol):
    """Makes tables, whose entries are made by one thread at a time."""

    def __call__(self, logits: Tensor, top_n: int, *, logits_stay: bool = False) -> LogprobTable:
        """Make a table.

        :param logits: float32 ``[R, V]``, V at least 1; rows contiguous. Rows that hold NaN, or whose largest logit is
            not finite, have no logprobs that mean anything
        :param top_n: how many of the likeliest tokens an entry lists; capped at V
        :param logits_stay: the logits are not overwritten before the table's entries are made
        """
        ...


def make_logprob_tables(device: torch.device) -> MakeLogprobTable:
    """Choose how logprobs are computed from logits on a device."""
    library = load() if device.type == "cpu" else None
    return TorchLogprobTable if library is None else partial(NativeLogprobTable, NativeLogprobs(library))
