"""Keeps the tokens that rank 0 samples on every rank's device, for the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import DRAWN, FOUND
from paged_sdk.runner.overlap import OverlapTokens

__all__ = ["SharedOverlap"]


class SharedOverlap(OverlapTokens):
    """Keeps rank 0's sampled tokens, and updates those of the other ranks.

    In recorded steps every rank finds the likeliest tokens itself; other tokens are broadcast from device to device.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, group: Group) -> None:
        super().__init__(max_num_seqs, device)
        self._group = group
        self._told: list[int] | None = None

    def put(self, seq_ids: list[int], tokens: Tensor) -> None:
        """Replace the tokens; see :meth:`OverlapTokens.put`."""
        own = self.tokens[: len(seq_ids)]
        torch.clamp(tokens, min=0, out=own)
        self._group.send_message((DRAWN, len(seq_ids)))
        self._group.broadcast(own)
        self.found(seq_ids)

    def found(self, seq_ids: list[int]) -> None:
        """Set the sequences of the tokens; see :meth:`OverlapTokens.found`."""
        super().found(seq_ids)
        if seq_ids != self._told:
            self._group.send_message((FOUND, list(seq_ids)))
            self._told = list(seq_ids)
