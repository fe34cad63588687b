"""Token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["Embedding"]


class Embedding:
    """One row per token of the vocabulary.

    :param weight: ``[vocab_size, hidden_size]``
    :param scale: multiplies the rows, itself rounded to their dtype as gemma was trained; None: 1
    """

    def __init__(self, weight: Tensor, *, scale: float | None = None) -> None:
        self.weight = weight
        self._scale = None if scale is None else weight.new_tensor(scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ``[num_tokens]`` int64; a new tensor ``[num_tokens, hidden_size]``."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)
