"""Keeps the tokens that the first rank samples on the device of every rank, for the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import DRAWN, FOUND
from paged_sdk.runner.overlap import OverlapTokens

__all__ = ["SharedOverlap"]


class SharedOverlap(OverlapTokens):
    """Is the first rank's, and has the others do the same.

    The likeliest tokens are what every rank finds itself, in recorded steps; others go from device to device.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, group: Group) -> None:
        super().__init__(max_num_seqs, device)
        self._group = group
        self._told: list[int] | None = None

    def put(self, seq_ids: list[int], tokens: Tensor) -> None:
        """Replace the tokens; see :meth:`OverlapTokens.put`."""
        own = self.tokens[: len(seq_ids)]
        torch.clamp(tokens, min=0, out=own)
        self._group.tell((DRAWN, len(seq_ids)))
        self._group.pass_on(own)
        self.found(seq_ids)

    def found(self, seq_ids: list[int]) -> None:
        """Say whose the tokens are; see :meth:`OverlapTokens.found`."""
        super().found(seq_ids)
        if seq_ids != self._told:
            self._group.tell((FOUND, list(seq_ids)))
            self._told = list(seq_ids)
