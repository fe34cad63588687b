"""The seam for every form of matrix: dense, quantized, adapted, sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from paged_sdk.kernels.activation import GatedActivation, gated_activation, gated_activation_reference

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

    def forward_gated(self, x: Tensor, activation: GatedActivation) -> Tensor:
        """``activation(gate) * up`` of a layer whose outputs are the gate's, then as many of up (Shazeer, 2020, arXiv
        2002.05202).

        :param x: as of :meth:`forward`
        :returns: ``[num_rows, out_features / 2]`` of the same dtype
        """
        gate_up = self.forward(x)
        activate = gated_activation if gate_up.is_cuda else gated_activation_reference
        return activate(gate_up, activation)
