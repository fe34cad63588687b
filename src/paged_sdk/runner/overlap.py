"""Sampled tokens on their way from one step to the next, which the host has not seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OverlapTokens"]


class OverlapTokens:
    """The tokens that the last step sampled.

    :param max_num_seqs: tokens at most
    :ivar tokens: ``[max_num_seqs]`` int64, on the device. Where a row had nothing to choose there is some token all the
        same: its sequence ends before anybody sees what becomes of it
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seq_ids: list[int] = []
        self._places: dict[int, int] | None = None

    def put(self, seq_ids: list[int], tokens: Tensor) -> None:
        """Replace them.

        :param seq_ids: whose they are
        :param tokens: ``[len(seq_ids)]`` int64; -1: nothing could be chosen
        """
        torch.clamp(tokens, min=0, out=self.tokens[: len(seq_ids)])
        self._seq_ids, self._places = seq_ids, None

    def places(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """Where the tokens of some sequences lie, each of which has one."""
        if seq_ids == self._seq_ids:  # the same rows as before, as in most steps
            return range(len(seq_ids))
        if self._places is None:
            self._places = {seq_id: place for place, seq_id in enumerate(self._seq_ids)}
        return [self._places[seq_id] for seq_id in seq_ids]
