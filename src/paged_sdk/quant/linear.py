"""The seam for every form of matrix: dense, quantised, adapted, sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

__all__ = ["Linear"]


class Linear(ABC):
    """``x @ weight.T + bias``, however the weight is kept."""

    @property
    @abstractmethod
    def in_features(self) -> int:
        """Columns of the weight."""

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Rows of the weight."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Apply to rows.

        :param x: ``[num_rows, in_features]`` of the model's dtype
        :returns: ``[num_rows, out_features]`` of the same dtype, contiguous, the caller's to change
        """
