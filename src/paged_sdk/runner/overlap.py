"""Keeps sampled tokens on the device, where the next step reads them before the host has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["OverlapTokens"]


class OverlapTokens:
    """Keeps the tokens that the last step sampled.

    :param max_num_seqs: maximum number of tokens
    :ivar tokens: ``[max_num_seqs]`` int64, on the device. 0 for a row for which no token could be chosen: its sequence
        fails before results that depend on this token are used
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
        """Set the sequences of the tokens that a recorded step has written to :attr:`tokens`.

        :param seq_ids: the sequence of each token
        """
        self._seq_ids, self._places = seq_ids, None

    def places(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """Return the indices of the tokens of some sequences; each sequence must have a token."""
        if seq_ids == self._seq_ids:  # in most steps the rows do not change
            return range(len(seq_ids))
        if self._places is None:
            self._places = {seq_id: place for place, seq_id in enumerate(self._seq_ids)}
        return [self._places[seq_id] for seq_id in seq_ids]
