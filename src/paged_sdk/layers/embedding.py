"""Token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.gguf_blocks import BlockMatrix

__all__ = ["BlockEmbedding", "DenseEmbedding", "Embedding"]


class Embedding(ABC):
    """One row per token of the vocabulary."""

    @abstractmethod
    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ``[num_tokens]`` int64; a new tensor ``[num_tokens, hidden_size]`` of the model's dtype."""


class DenseEmbedding(Embedding):
    """Rows as they are.

    :param weight: ``[vocab_size, hidden_size]``
    :param scale: multiplies the rows, itself rounded to their dtype as gemma was trained; None: 1
    """

    def __init__(self, weight: Tensor, *, scale: float | None = None) -> None:
        self.weight = weight
        self._scale = None if scale is None else weight.new_tensor(scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """See :meth:`Embedding.forward`."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale is None else rows.mul_(self._scale)


class BlockEmbedding(Embedding):
    """Rows in quantised blocks, decoded as they are looked up: a step needs a few hundred of 150,000.

    :param matrix: ``[vocab_size, hidden_size]``
    :param dtype: of the rows
    :param scale: as of :class:`DenseEmbedding`
    """

    def __init__(self, matrix: BlockMatrix, *, dtype: torch.dtype, scale: float | None = None) -> None:
        self.matrix = matrix
        self._dtype = dtype
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """See :meth:`Embedding.forward`."""
        rows = BlockMatrix(self.matrix.tensor_type, self.matrix.blocks[token_ids]).decoded(self._dtype)
        return rows if self._scale is None else rows.mul_(self._scale)
