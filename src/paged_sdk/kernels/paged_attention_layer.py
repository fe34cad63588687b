"""Offers paged attention as a torch module, for models of your own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention import masked_attention
from paged_sdk.kernels.attention_inputs import LayerCache, ScoreOptions
from paged_sdk.kernels.checks import check_heads, check_score_options, check_tensor
from paged_sdk.kernels.fallback import device_of
from paged_sdk.kernels.input_metadata import InputMetadata
from paged_sdk.kernels.kv_cache import reshape_and_cache
from paged_sdk.kernels.paged_attention import paged_attention, why_not_triton
from paged_sdk.kernels.prefill_choice import PagedPrefill, PrefillShape, faster_for_prefill
from paged_sdk.logs import get_logger

__all__ = ["PagedAttention"]

_log = get_logger(__name__)


class PagedAttention(nn.Module):
    """Writes the keys and values of new tokens into a paged cache, then attends. It has no parameters and no gradient.

    Attention is causal for every batch: the metadata gives each token's position in its sequence.

    On CUDA devices, Triton's kernels or torch's FlashAttention serve prefill, whichever is faster: both are timed, for
    some milliseconds, when the first layer of a kind meets a prefill, and the log says which was chosen. While a CUDA
    graph is recorded, nothing is timed and a layer keeps its earlier choice. Triton's kernels serve a kind of prefill
    that first occurs during a recording, and everything that is compiled by ``torch.compile`` or tracked by autograd.

    :param num_heads: number of query heads, a multiple of ``num_kv_heads``
    :param head_size: elements per head
    :param scale: multiplies the scores; usually ``head_size ** -0.5``
    :param num_kv_heads: KV heads; None: ``num_heads``
    :param sliding_window: number of keys that a query sees, its own included; None: all
    :param alibi_slopes: one per query head: adds ``slope * (key position - query position)`` to the scores (Press et
        al., 2021, arXiv 2108.12409). A buffer that moves with the layer
    :param softcap: scores become ``softcap * tanh(score / softcap)``
    :raises ConfigError: an invalid setting
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads: int = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self._prefills: dict[PrefillShape, PagedPrefill] = {}
        check_heads(num_heads, self.num_kv_heads)
        check_score_options(scale, sliding_window, softcap)
        if head_size < 1:
            raise ConfigError.of("head_size", head_size, "an int >= 1")
        slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        if slopes is not None and slopes.shape != (num_heads,):
            raise ConfigError.of("alibi_slopes", tuple(slopes.shape), f"one number for each of {num_heads} heads")
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        input_metadata: InputMetadata,
        softcapping: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values to the caches, then attend.

        Queries, keys and values may have any leading dimensions, whose product is the number of tokens, in the
        metadata's order, followed by either ``heads, head_size`` or ``heads * head_size``: ``[num_tokens, num_heads,
        head_size]``, ``[1, num_tokens, num_heads * head_size]``, for decodes ``[batch, 1, num_heads * head_size]``, ...

        :param query: float32, float16 or bfloat16, ``num_heads`` heads
        :param key: ``num_kv_heads`` heads; ``value`` likewise
        :param attention_mask: None: causal. Otherwise True where a key is seen, or numbers to add to the scores, as in
            torch's ``scaled_dot_product_attention``; ``[num_tokens, num_tokens]``, with any leading dimensions of 1 and
            one of ``num_heads``. The sliding window applies as well. Only for one sequence without block tables
        :param key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of the query's dtype or float8_e4m3fn,
            changed in place; ``value_cache`` likewise. None for both: nothing is written
        :param softcapping: instead of the layer's ``softcap``, for this call
        :param k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32 of f8e4m3 caches, changed in place;
            ``v_scale`` likewise
        :returns: in the query's shape
        :raises ConfigError: arguments that do not fit together
        """
        tokens = self._heads("query", query, self.num_heads)
        keys = self._heads("key", key, self.num_kv_heads)
        values = self._heads("value", value, self.num_kv_heads)
        softcap = self.softcap if softcapping is None else softcapping
        check_score_options(self.scale, self.sliding_window, softcap)
        self._check_tensors(tokens, keys, values, input_metadata)
        self._check_caches(tokens, keys, key_cache, value_cache, input_metadata)
        mask = None if attention_mask is None else self._mask(attention_mask, tokens, keys, input_metadata)
        if key_cache is not None and value_cache is not None:
            slots = input_metadata.slot_mapping.long()
            reshape_and_cache(keys, values, key_cache, value_cache, slots, k_scale, v_scale)
        if mask is not None:
            scores = ScoreOptions(
                scale=self.scale, window=self.sliding_window, softcap=softcap, alibi_slopes=self.alibi_slopes
            )
            return masked_attention(tokens, keys, values, mask, scores).view(query.shape)
        if input_metadata.block_tables is None or key_cache is None or value_cache is None:
            # Each key is a page of one token: kernels are compiled per page size, which must not depend on the batch.
            key_cache, value_cache = keys[:, None].contiguous(), values[:, None].contiguous()
            k_scale = v_scale = None
        # FlashAttention's gradient would omit keys read from the cache, so the op serves here, which has no gradient.
        followed = torch.is_grad_enabled() and any(each.requires_grad for each in (tokens, keys, values))
        if input_metadata.is_prefill and not followed and (prefill := self._prefill(tokens, key_cache, softcap)):
            prefill_rows = input_metadata.prefill_rows(len(tokens), key_cache.shape[1])
            if prefill.suits(prefill_rows):
                tokens, keys, values = map(_readable, (tokens, keys, values))
                cache = LayerCache(key_cache, value_cache, k_scale, v_scale)
                with device_of(tokens):
                    return prefill(tokens, keys, values, cache, prefill_rows).view(query.shape)
        rows = input_metadata.rows
        return paged_attention(
            tokens,
            key_cache,
            value_cache,
            rows.block_tables,
            rows.context_lens,
            rows.cu_seqlens_q,
            max_seqlen_q=rows.max_seqlen_q,
            max_context_len=rows.longest(key_cache.shape[1]),
            scale=self.scale,
            window=self.sliding_window,
            softcap=softcap,
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.float(),
            k_scale=k_scale,
            v_scale=v_scale,
        ).view(query.shape)

    def extra_repr(self) -> str:
        """Describe the layer for ``print``."""
        return (
            f"num_heads={self.num_heads}, head_size={self.head_size}, num_kv_heads={self.num_kv_heads}, "
            f"sliding_window={self.sliding_window}, softcap={self.softcap}"
        )

    def _prefill(self, tokens: Tensor, key_cache: Tensor, softcap: float | None) -> PagedPrefill | None:
        """Return the chosen prefill kernel of this layer, or None if there is no choice and the op serves."""
        if self.alibi_slopes is not None or self.scale <= 0 or not _has_choice(tokens):
            return None
        shape = PrefillShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            block_size=key_cache.shape[1],
            dtype=tokens.dtype,
            device=tokens.device,
            scale=self.scale,
            window=self.sliding_window,
            softcap=softcap,
            quantized=key_cache.dtype == torch.float8_e4m3fn,
        )
        if not _is_recording():
            self._prefills[shape] = _fastest_prefill(shape)
        return self._prefills.get(shape)

    def _heads(self, name: str, vectors: Tensor, num_heads: int) -> Tensor:
        """View vectors as ``[num_tokens, num_heads, head_size]``.

        :raises ConfigError: they have another shape
        """
        if vectors.dim() >= 2 and vectors.shape[-1] == num_heads * self.head_size:
            return vectors.reshape(-1, num_heads, self.head_size)
        if vectors.dim() >= 3 and vectors.shape[-2:] == (num_heads, self.head_size):
            return vectors.reshape(-1, num_heads, self.head_size)
        allowed = f"[..., {num_heads}, {self.head_size}] or [..., {num_heads * self.head_size}]"
        raise ConfigError.of(f"{name}.shape", tuple(vectors.shape), allowed)

    def _check_tensors(self, tokens: Tensor, keys: Tensor, values: Tensor, metadata: InputMetadata) -> None:
        check_tensor("key", keys, ("num_keys", self.num_kv_heads, self.head_size), (tokens.dtype,), tokens.device)
        check_tensor("value", values, tuple(keys.shape), (tokens.dtype,), tokens.device)
        check_tensor("slot_mapping", metadata.slot_mapping, (len(keys),), (torch.int32, torch.int64), tokens.device)

    def _check_caches(
        self,
        tokens: Tensor,
        keys: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        metadata: InputMetadata,
    ) -> None:
        if (key_cache is None) != (value_cache is None):
            raise ConfigError.of("key_cache" if key_cache is None else "value_cache", None, "both caches, or neither")
        if metadata.block_tables is not None and key_cache is None:
            raise ConfigError.of("key_cache", None, "both caches, as the metadata has block tables")
        more_keys = metadata.block_tables is None and metadata.cu_seqlens_k is not None
        if len(tokens) != len(keys) and not more_keys:
            raise ConfigError.of("key.shape", tuple(keys.shape), f"a key for each of {len(tokens)} query tokens")

    def _mask(self, mask: Tensor, tokens: Tensor, keys: Tensor, metadata: InputMetadata) -> Tensor:
        """View an attention mask as ``[1 or num_heads, num_tokens, num_keys]``.

        :raises ConfigError: shape or dtype do not fit, or the batch takes no mask
        """
        shape = tuple(mask.shape)
        if metadata.block_tables is not None or metadata.rows.context_lens.numel() != 1:
            raise ConfigError.of("attention_mask.shape", shape, "None, except for one sequence without block tables")
        *leading, heads = (1, *shape[:-2])
        if shape[-2:] != (len(tokens), len(keys)) or heads not in (1, self.num_heads) or any(n != 1 for n in leading):
            allowed = f"[{len(tokens)}, {len(keys)}], before that 1 or {self.num_heads} heads"
            raise ConfigError.of("attention_mask.shape", shape, allowed)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ConfigError.of("attention_mask.dtype", mask.dtype, "bool or floating point")
        return mask.reshape(heads, *shape[-2:])


def _readable(vectors: Tensor) -> Tensor:
    """Return vectors aligned for FlashAttention, which loads 16 bytes at a time; copy them if they are not."""
    *strides, adjacent = vectors.stride()
    if adjacent == 1 and not any(place * vectors.itemsize % 16 for place in strides) and vectors.data_ptr() % 16 == 0:
        return vectors
    return vectors.clone(memory_format=torch.contiguous_format)


def _has_choice(tokens: Tensor) -> bool:
    """Return whether Triton kernels and FlashAttention may both serve; False while torch traces or compiles."""
    if torch.compiler.is_compiling() or type(tokens) is not Tensor or not tokens.is_cuda:
        return False
    return why_not_triton(tokens) is None


def _is_recording() -> bool:
    """Return whether a CUDA graph is being recorded, during which nothing can be timed."""
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _fastest_prefill(shape: PrefillShape) -> PagedPrefill:
    """Time both kernels and return the faster, once per shape and process."""
    with torch.cuda.device(shape.device):
        choice = faster_for_prefill(shape)
    _log.info("PagedAttention with %d heads of %d: prefill by %s.", shape.num_heads, shape.head_dim, choice)
    return choice
