"""Make batches over a paged cache, and attend over them as the papers write it: token by token, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.key_offsets import KEY_SPAN

#: What table entries hold that nobody may look at.
ARBITRARY: Final = -(1 << 30)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slope: float = 0.0,
    sink: float | None = None,
) -> Tensor:
    """Attend with one query vector ``[head_dim]`` at a position, over one head's keys and values ``[length,
    head_dim]``.
    """
    first = 0 if window is None else max(0, position - window + 1)
    seen = torch.arange(first, max(first, position + 1))
    if len(seen) == 0:
        return torch.zeros_like(query)
    scores = key[seen] @ query * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + slope * (seen - position)
    weights = scores.exp()
    total = weights.sum() + (0 if sink is None else torch.tensor(sink, dtype=torch.float64).exp())
    return (weights / total) @ value[seen]


class PagedCase:
    """Holds sequences with random vectors in scattered pages; every other slot holds NaN.

    :param rows: (query tokens, context length) of each sequence
    :param heads: (query heads, KV heads, head size)
    :param quantized: whether the cache is f8e4m3
    :param offset: the size of the offset that is subtracted from its keys before they are stored; None: there is none
    :param window: the sliding window; block table entries of blocks out of it are arbitrary
    :param key_only: the first elements of keys that are no part of the values, where keys are the values, too (latent
        attention); None: values are vectors of their own
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        heads: tuple[int, int, int] = (4, 2, 16),
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 8,
        quantized: bool = False,
        offset: float | None = None,
        window: int | None = None,
        key_only: int | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_dim = heads
        self.rows = rows
        self.window = window
        self.key_only = key_only
        counts = [-(-length // block_size) for _, length in rows]
        blocks = torch.randperm(sum(counts) + 2, generator=generator)
        self.block_tables = torch.full((len(rows), max(counts) + 1), ARBITRARY, dtype=torch.int32)
        cache_shape = (len(blocks), block_size, num_kv_heads, head_dim)
        caches = torch.full((2, *cache_shape), torch.nan)
        self.slots: list[Tensor] = []
        for row, own in enumerate(torch.split(blocks[: sum(counts)], counts)):
            num_tokens, length = rows[row]
            slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            caches.flatten(1, 2)[:, slots] = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
            self.slots.append(slots)
            self.block_tables[row, : len(own)] = own
            if window is not None:
                self.block_tables[row, : max(0, length - num_tokens - window + 1) // block_size] = ARBITRARY
        if key_only is not None:
            caches[1] = caches[0]
        self.key_cache, self.value_cache = caches.to(dtype)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        self._vectors = caches.to(dtype).double().flatten(1, 2)
        if quantized:
            (self.key_cache, self.k_scale), (self.value_cache, self.v_scale) = map(quantize_f8e4m3, caches)
            self._vectors = torch.stack(
                (
                    self.key_cache.double() * self.k_scale.double()[..., None],
                    self.value_cache.double() * self.v_scale.double()[..., None],
                )
            ).flatten(1, 2)
        ends = list(itertools.accumulate((num_tokens for num_tokens, _ in rows), initial=0))
        self.cu_seqlens_q = torch.tensor(ends, dtype=torch.int32)
        self.context_lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
        self.max_seqlen_q = max(num_tokens for num_tokens, _ in rows)
        self.max_context_len = max(length for _, length in rows)
        self.query = torch.randn(ends[-1], num_heads, head_dim, generator=generator).to(dtype)
        self.alibi_slopes = 2.0 ** -torch.arange(1.0, num_heads + 1)
        self.sinks = torch.randn(num_heads, generator=generator)
        self.key_offsets: Tensor | None = None
        if offset is not None:
            num_spans = -(-self.max_context_len // KEY_SPAN)
            self.key_offsets = offset * torch.randn(num_spans, num_kv_heads, head_dim, generator=generator)

    @property
    def cache(self) -> LayerCache:
        """Return the pages as they are now."""
        return self.cache_on(torch.device("cpu"))

    def cache_on(self, device: torch.device) -> LayerCache:
        """Return the pages as they are now, on a device."""
        key, value, k_scale, v_scale, offsets = (
            None if each is None else each.to(device)
            for each in (self.key_cache, self.value_cache, self.k_scale, self.v_scale, self.key_offsets)
        )
        assert key is not None
        assert value is not None
        if self.key_only is not None:
            return LayerCache(key, key, k_scale, k_scale, offsets, key_only=self.key_only)
        return LayerCache(key, value, k_scale, v_scale, offsets)

    @property
    def paged_rows(self) -> PagedRows:
        """Return the rows as they are now."""
        return self.rows_on(torch.device("cpu"))

    def rows_on(self, device: torch.device) -> PagedRows:
        """Return the rows as they are now, on a device."""
        return PagedRows(
            block_tables=self.block_tables.to(device),
            context_lens=self.context_lens.to(device),
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            max_seqlen_q=self.max_seqlen_q,
            max_context_len=self.max_context_len,
        )

    def expected(
        self, *, scale: float, softcap: float | None = None, alibi: bool = False, sinks: bool = False
    ) -> Tensor:
        """Return the expected output, ``[num_tokens, num_heads, head_dim]`` float64."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        num_heads, num_kv_heads = self.query.shape[1], self._vectors.shape[2]
        for row, (num_tokens, length) in enumerate(self.rows):
            key, value = self._vectors[:, self.slots[row]]
            if self.key_offsets is not None:
                key = key + self.key_offsets.double()[torch.arange(length) // KEY_SPAN]
            for i, head in itertools.product(range(num_tokens), range(num_heads)):
                token = int(self.cu_seqlens_q[row]) + i
                kv_head = head // (num_heads // num_kv_heads)
                output[token, head] = attend(
                    self.query[token, head].double(),
                    key[:, kv_head],
                    value[:, kv_head],
                    length - num_tokens + i,
                    scale=scale,
                    window=self.window,
                    softcap=softcap,
                    slope=float(self.alibi_slopes[head]) if alibi else 0.0,
                    sink=float(self.sinks[head]) if sinks else None,
                )
        return output
