"""Paged attention by Triton's kernels, for CUDA devices. To be imported where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionStep, RowSpan
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.triton.kv_cache import copy_blocks, reshape_and_cache
from paged_sdk.kernels.triton.paged_attention import paged_attention
from paged_sdk.kernels.triton.rotary import rotate_and_cache

__all__ = ["TritonPagedBackend", "TritonPagedStep"]

_ALIGNMENT: Final = 16  # kernels are compiled anew for pointers that are aligned to less


class TritonPagedBackend(PagedBackend):
    """A pool of KV blocks on a CUDA device. Takes what :class:`PagedBackend` takes.

    A step makes one copy to the device and launches two kernels per layer, and does not wait for any of it. It calls
    what launches the kernels instead of the custom ops, whose dispatch takes as long as a launch.
    """

    def prepare(self, rows: Sequence[RowSpan]) -> TritonPagedStep:
        """See :meth:`AttentionBackend.prepare`."""
        return TritonPagedStep(self, rows)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a whole block of all layers in one launch, and its scales in another."""
        (pairs,) = _to_device(self._device, np.array([[source, target]]))
        copy_blocks(
            [layer.key for layer in self._layers],
            [layer.value for layer in self._layers],
            pairs,
            [layer.k_scale for layer in self._layers if layer.k_scale is not None],
            [layer.v_scale for layer in self._layers if layer.v_scale is not None],
        )


class TritonPagedStep(AttentionStep):
    """One step of a :class:`TritonPagedBackend`."""

    def __init__(self, backend: TritonPagedBackend, rows: Sequence[RowSpan]) -> None:
        arrays = backend._varlen(rows)
        self._config = backend._config
        self._layers = backend._layers
        self._slot_mapping, *self._batch = _to_device(
            backend._device, arrays.slot_mapping, arrays.block_tables, arrays.context_lens, arrays.cu_seqlens_q
        )
        self._max_seqlen_q = max(row.num_new_tokens for row in rows)
        self._max_context_len = max(row.end for row in rows)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :meth:`AttentionStep.forward`."""
        cache = self._layers[layer]
        reshape_and_cache(key, value, cache.key, cache.value, self._slot_mapping, cache.k_scale, cache.v_scale)
        return self._attend(layer, query)

    def rotate_and_forward(self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
        """See :meth:`AttentionStep.rotate_and_forward`; rotation and write are one launch."""
        num_heads = self._config.num_heads
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        cache = self._layers[layer]
        rotate_and_cache(
            query,
            key,
            value,
            rotation.cosines,
            rotation.sines,
            cache.key,
            cache.value,
            self._slot_mapping,
            cache.k_scale,
            cache.v_scale,
        )
        return self._attend(layer, query)

    def _attend(self, layer: int, query: Tensor) -> Tensor:
        cache = self._layers[layer]
        return paged_attention(
            query,
            cache.key,
            cache.value,
            *self._batch,
            max_seqlen_q=self._max_seqlen_q,
            max_context_len=self._max_context_len,
            scale=self._config.attention_scale,
            window=self._config.sliding_windows[layer],
            softcap=self._config.attention_softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )


def _to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Tensors like some arrays, by one copy, which nobody waits for: pinned memory is kept until it is done."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, array in zip(torch.split(host, sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = array.view(np.uint8).ravel()
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
