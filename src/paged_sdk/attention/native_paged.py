"""Paged attention by the native CPU kernels, which read the pages in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_sdk.attention.backend import RowSpan
from paged_sdk.attention.paged import PagedBackend, new_positions
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.key_offsets import subtract_key_offsets
from paged_sdk.kernels.kv_cache import write_slots
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import (
    AttentionShape,
    LayerCache,
    VarlenBatch,
    native_paged_attention,
)
from paged_sdk.kernels.step import AttentionStep

__all__ = ["NativePagedBackend", "NativePagedStep", "why_not_native"]


def why_not_native(config: DecoderConfig, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve a model, or None if they can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its dtype is {dtype}, and the kernels take float32, bfloat16 and float16"
    if config.head_dim % 16:
        return f"its heads have {config.head_dim} elements, and the kernels take multiples of 16"
    return None


class NativePagedBackend(PagedBackend):
    """A pool of KV blocks on the CPU. Takes what :class:`PagedBackend` takes.

    :param workspace: of the engine that calls
    :param exact: float32 arithmetic for every token; False: chunks of prompts may use the CPU's bfloat16 products,
        which are faster
    """

    def __init__(
        self,
        config: DecoderConfig,
        settings: PoolSettings,
        num_blocks: int,
        *,
        workspace: Workspace,
        exact: bool = True,
    ) -> None:
        assert settings.device.type == "cpu", settings.device
        super().__init__(config, settings, num_blocks)
        self.workspace = workspace
        self.caches = tuple(
            LayerCache(layer.key, layer.value, layer.k_scale, layer.v_scale, layer.key_offsets)
            for layer in self._layers
        )
        self.shapes = tuple(
            AttentionShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                window=window,
                softcap=config.attention_softcap,
                exact=exact,
            )
            for window in config.sliding_windows
        )

    def prepare(self, rows: Sequence[RowSpan]) -> NativePagedStep:
        """See :meth:`AttentionBackend.prepare`."""
        arrays = self._varlen(rows)
        batch = VarlenBatch(
            cu_seqlens_q=torch.from_numpy(arrays.cu_seqlens_q),
            block_tables=torch.from_numpy(arrays.block_tables),
            context_lens=torch.from_numpy(arrays.context_lens),
        )
        positions = self._where_offsets(new_positions(rows))
        return NativePagedStep(self, torch.from_numpy(arrays.slot_mapping), batch, positions)


class NativePagedStep(AttentionStep):
    """One step.

    :ivar slots: ``[num_tokens]`` int64: where the tokens' keys and values go
    :ivar batch: which tokens belong to which sequence
    """

    def __init__(
        self, backend: NativePagedBackend, slots: Tensor, batch: VarlenBatch, positions: Tensor | None
    ) -> None:
        self.slots = slots
        self.batch = batch
        self._backend = backend
        self._positions = positions

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :meth:`AttentionStep.forward`."""
        cache = self._backend.caches[layer]
        if cache.key_offsets is not None:
            assert self._positions is not None
            key = subtract_key_offsets(key, cache.key_offsets, self._positions)
        write_slots(key, value, cache.key, cache.value, self.slots, cache.k_scale, cache.v_scale)
        return self.attend(layer, query)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention alone, over keys and values that are in the cache already."""
        backend = self._backend
        return native_paged_attention(
            backend.workspace, query, backend.caches[layer], self.batch, backend.shapes[layer]
        )
