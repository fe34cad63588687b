"""Look up token embeddings in the native kernels' layout."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.packed import PackedWeight, decode_rows
from paged_sdk.quant.embedding import Embedding

__all__ = ["NativeEmbedding"]


class NativeEmbedding(Embedding):
    """Holds packed rows and decodes them on lookup.

    :param workspace: the calling engine's workspace
    :param weight: ``[vocab_size, hidden_size]``
    :param dtype: see :class:`Embedding`
    :param scale: see :class:`Embedding`
    """

    def __init__(
        self, workspace: Workspace, weight: PackedWeight, *, dtype: torch.dtype, scale: float | None = None
    ) -> None:
        super().__init__(dtype=dtype, scale=scale)
        self.weight = weight
        self._workspace = workspace

    @property
    def native_weight(self) -> PackedWeight | None:
        """Implement :attr:`Embedding.native_weight`."""
        return self.weight if self.weight.order is None else None

    def in_float32(self, token_ids: Tensor) -> Tensor:
        """Implement :meth:`Embedding.in_float32`."""
        return self._decoded(token_ids).mul_(self.scale)

    def _rows(self, token_ids: Tensor) -> Tensor:
        return self._decoded(token_ids).to(self._dtype)

    def _decoded(self, token_ids: Tensor) -> Tensor:
        threads = self._workspace.num_threads
        return decode_rows(self._workspace.library, self.weight, token_ids, num_threads=threads)
