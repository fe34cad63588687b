"""Keeps sampled tokens on the device for the next step, before the host has seen them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OverlapTokens"]


class OverlapTokens:
    """Keeps the tokens that the last step sampled.

    :param max_num_seqs: the most tokens to keep
    :ivar tokens: ``[max_num_seqs]`` int64, on the device. A row for which no token could be chosen has token 0: its
        sequence ends before the results that follow from it are read
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens: torch.Tensor = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seq_ids: list[int] = []
        self._places: dict[int, int] | None = None

    def put(self, seq_ids: list[int], tokens: Tensor) -> None:
        """Replace the tokens.

        :param seq_ids: the sequence of each token
        :param tokens: ``[len(seq_ids)]`` int64; -1: no token could be chosen
        """
        torch.clamp(tokens, min=0, out=self.tokens[: len(seq_ids)])
        self.found(seq_ids)

    def found(self, seq_ids: list[int]) -> None:
        """Say whose the tokens are that a recorded step has left in place of those before.

        :param seq_ids: the sequence of each token
        """
        self._seq_ids, self._places = seq_ids, None

    def places(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """Return the indices of the tokens of some sequences, each of which must have one."""
        if seq_ids == self._seq_ids:  # the same rows as before, as in most steps
            return range(len(seq_ids))
        if self._places is None:
            self._places = {seq_id: place for place, seq_id in enumerate(self._seq_ids)}
        return [self._places[seq_id] for seq_id in seq_ids]
