"""Defines what runs beside a model to draft from its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend

__all__ = ["MOST_DRAFTS", "BesideLayers", "block_tensors_beside"]

MOST_DRAFTS: Final = 32
"""Most drafts of a sequence: of layers that are right in 95 of 100 cases, the last one is right in a fifth."""


class BesideLayers(Protocol):
    """Describes layers that draft from a model's hidden states. Requantizing the model makes it anew."""

    @property
    def own_backends(self) -> Sequence[AttentionBackend]:
        """Return what holds the layers' own keys and values, in blocks with the ids of the model's; none if they have
        none.
        """
        ...


def block_tensors_beside(backend: AttentionBackend, layers: BesideLayers | None) -> Sequence[Tensor]:
    """Return the tensors whose first dimension is the block: the model's, and those of layers beside it."""
    backends = (backend, *(() if layers is None else layers.own_backends))
    return [tensor for each in backends for tensor in each.block_tensors]
