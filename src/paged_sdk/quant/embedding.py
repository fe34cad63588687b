"""Look up token embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.decode_rows import decode_rows
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix

__all__ = ["BlockEmbedding", "DenseEmbedding", "Embedding", "TritonBlockEmbedding"]


class Embedding(ABC):
    """Holds one row per token of the vocabulary.

    :param dtype: the dtype of the rows
    :param scale: multiplies the rows; the scale itself is rounded to their dtype, as Gemma was trained; None: 1
    """

    def __init__(self, *, dtype: torch.dtype, scale: float | None) -> None:
        self._dtype = dtype
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up the rows of token ids, ``[num_tokens]`` int64.

        :returns: a new tensor ``[num_tokens, hidden_size]`` of the model's dtype
        """
        rows = self._rows(token_ids)
        return rows if self._scale is None else rows.mul_(self._scale)

    def in_float32(self, token_ids: Tensor) -> Tensor:
        """Look up rows like :meth:`forward`, but return float32. Forms that decode their rows to float32 do not round
        them to the model's dtype in between.
        """
        return self.forward(token_ids).float()

    @property
    def scale(self) -> float:
        """Return the factor of the rows."""
        return 1.0 if self._scale is None else float(self._scale)

    @property
    def stored(self) -> StoredMatrix | None:
        """Return the table for a tied output projection; None: only this form's own projection can share it."""
        return None

    @property
    def native_weight(self) -> PackedWeight | None:
        """Return the table as native kernels read it. :meth:`in_float32` returns its rows exactly, times
        :attr:`scale`; None: they cannot read it.
        """
        return None

    @abstractmethod
    def _rows(self, token_ids: Tensor) -> Tensor:
        """Return the unscaled rows as a new tensor."""


class DenseEmbedding(Embedding):
    """Holds rows in the model's dtype.

    :param weight: ``[vocab_size, hidden_size]``
    :param scale: see :class:`Embedding`
    """

    def __init__(self, weight: Tensor, *, scale: float | None = None) -> None:
        super().__init__(dtype=weight.dtype, scale=scale)
        self.weight = weight

    @property
    def stored(self) -> DenseMatrix:
        """Return the table. It shares this embedding's memory."""
        return DenseMatrix(self.weight)

    def _rows(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class BlockEmbedding(Embedding):
    """Holds rows in quantized blocks and decodes them on lookup: a step needs a few hundred of 150,000.

    :param matrix: ``[vocab_size, hidden_size]``
    :param dtype: see :class:`Embedding`
    :param scale: see :class:`Embedding`
    """

    def __init__(self, matrix: BlockMatrix, *, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__(dtype=dtype, scale=scale)
        self.matrix: BlockMatrix = matrix.to(torch.device("cpu"))  # reads the matrix if it is still in a file

    @property
    def stored(self) -> BlockMatrix:
        """Return the table. It shares this embedding's memory."""
        return self.matrix

    def _rows(self, token_ids: Tensor) -> Tensor:
        return BlockMatrix(self.matrix.tensor_type, self.matrix.blocks[token_ids]).decoded(self._dtype)


class TritonBlockEmbedding(Embedding):
    """Holds rows in the GPU layout and decodes them on lookup, in one launch.

    :param matrix: ``[vocab_size, hidden_size]``, which an output projection may share
    :param dtype: see :class:`Embedding`
    :param scale: see :class:`Embedding`
    """

    def __init__(self, matrix: TritonBlockMatrix, *, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__(dtype=dtype, scale=scale)
        self.matrix = matrix

    def _rows(self, token_ids: Tensor) -> Tensor:
        return decode_rows(self.matrix, token_ids, self._dtype)
