"""Holds a layer for multi-token prediction as it runs beside its model, and says where its keys and values are."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.mtp_module import MtpModule
from paged_sdk.runner.beside_layers import MOST_DRAFTS

__all__ = ["MtpLayer", "ScratchBlocks"]


@frozen
class ScratchBlocks:
    """Says where drafts' keys and values are written: in blocks of the layer's pool beyond those of the KV manager.

    A sequence's own blocks have no room for drafts before the scheduler has granted them.

    :ivar first: id of the first of these blocks
    :ivar block_size: tokens per block
    :ivar per_sequence: number of these blocks that a sequence needs
    """

    first: int
    block_size: int
    per_sequence: int

    @staticmethod
    def needed(block_size: int, gamma: int) -> int:
        """Return the number of blocks that a sequence's drafts need."""
        return -(-min(gamma, MOST_DRAFTS) // block_size)

    def extended(self, kv_ids: Sequence[int], num_tokens: int, place: int) -> list[int]:
        """Return the blocks of a sequence's first tokens, followed by blocks for drafts.

        :param place: the sequence's place in the step, which no other sequence has
        """
        own = kv_ids[: -(-num_tokens // self.block_size)]
        first = self.first + place * self.per_sequence
        return [*own, *range(first, first + self.per_sequence)]


@frozen(eq=False)
class MtpLayer:
    """Holds a layer for multi-token prediction as it runs.

    :ivar module: the layer
    :ivar backend: holds its KV
    :ivar target: the model as it runs
    :ivar scratch: where the KV of drafts is, if KV is in blocks; None: it is contiguous
    """

    module: MtpModule
    backend: AttentionBackend
    target: CausalModel
    scratch: ScratchBlocks | None

    @property
    def own_backends(self) -> tuple[AttentionBackend, ...]:
        """See :class:`~paged_sdk.runner.beside_layers.BesideLayers`."""
        return (self.backend,)
