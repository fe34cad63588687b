"""Holds the inputs of paged attention other than queries: a layer's pages, a batch's rows and the score options.

The public functions take separate tensors, as torch.library requires; the code behind them takes these values.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.checks import check_pages, check_score_options, check_tensor
from paged_sdk.kernels.key_offsets import check_key_offsets
from paged_sdk.kernels.kv_basis import KvBasis
from paged_sdk.kernels.relative_bias import RelativeBias

__all__ = ["LayerCache", "LearnedScores", "PagedRows", "Precision", "ScoreOptions"]


class Precision(IntEnum):
    """Names the lowest precision in which attention on the CPU may multiply. It is used where the CPU is faster with
    it. Sums are always exact or float32.
    """

    FLOAT32 = 0
    """Float32 for all tokens."""

    BFLOAT16 = 1
    """Queries, keys, weights and values rounded to bfloat16: twice as fast on AVX-512 with BF16. On AVX2, 16-bit codes
    for many tokens of a sequence: more accurate than bfloat16, and some 1.5 times as fast as float32.
    """

    INT8 = 2
    """8-bit codes with one scale per vector, for many tokens of a sequence: four times as fast on AVX-512 with VNNI.
    For few tokens, bfloat16. On AVX2, and on CPUs with AMX, the same as :attr:`BFLOAT16`.
    """


@frozen(eq=False)
class LayerCache:
    """Holds the pages of one layer's KV cache.

    :ivar key: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the queries' dtype or float8_e4m3fn, or
        ``[..., head_dim // 2]`` uint8, two 4-bit codes per byte (:mod:`paged_sdk.kernels.q4`); contiguous
    :ivar value: likewise; the same tensor if keys are also the values (:attr:`values_are_keys`), as ``v_scale`` is then
    :ivar k_scale: of an f8e4m3 cache ``[num_blocks, block_size, num_kv_heads]`` float32, of 4-bit codes ``[...,
        head_dim // 32, 2]`` bfloat16, scales and minimums
    :ivar v_scale: likewise
    :ivar key_offsets: ``[num_spans, num_kv_heads, head_dim]`` float32, of a quantized cache only: the offsets
        subtracted from keys before storing (:mod:`paged_sdk.kernels.key_offsets`), covering at least the longest
        context; None: no offsets
    :ivar key_only: number of first elements of keys that are no part of the values, if keys are also the values:
        attention may leave these elements of its output unwritten
    :ivar basis: the basis of keys and values, key offsets included. Attention ops compute in it and leave the change of
        basis to their callers; fused layers change it themselves. None: the heads' own
    :raises ConfigError: shapes, dtypes, strides or devices do not fit each other
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    key_offsets: Tensor | None = None
    basis: KvBasis | None = None
    key_only: int = 0

    def __attrs_post_init__(self) -> None:
        check_pages(self.key, self.value, self.k_scale, self.v_scale)
        check_key_offsets(self.key_offsets, self.key, 0)
        assert self.key_only == 0 or (self.values_are_keys and self.key_only < self.head_dim), self.key_only
        if self.basis is not None:
            heads = self.num_kv_heads, self.head_dim
            check_tensor("basis.factors", self.basis.factors, heads, (torch.float32,), self.key.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the pages and their scales: the tensors whose first dimension is the block."""
        scales = [self.k_scale] if self.values_are_keys else [self.k_scale, self.v_scale]
        return [*self.pages, *(each for each in scales if each is not None)]

    @property
    def pages(self) -> list[Tensor]:
        """Return the tensors of keys and values: a single one if keys are the values."""
        return [self.key] if self.values_are_keys else [self.key, self.value]

    @property
    def values_are_keys(self) -> bool:
        """Return whether only keys are kept, which are the values, too."""
        return self.value is self.key

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        """Return the number of elements per head."""
        return self.key.shape[3] * (2 if self.is_q4 else 1)

    @property
    def quantized(self) -> bool:
        """Return whether keys and values are codes with scales."""
        return self.k_scale is not None

    @property
    def is_q4(self) -> bool:
        """Return whether keys and values are 4-bit codes."""
        return self.key.dtype == torch.uint8


@frozen(eq=False, kw_only=True)
class PagedRows:
    """Describes a batch of rows, each of consecutive tokens of one sequence.

    :func:`~paged_sdk.kernels.paged_attention.paged_attention` defines which keys each token sees.

    :ivar block_tables: ``[num_rows, max_blocks]`` int32
    :ivar context_lens: ``[num_rows]`` int32: number of keys of each row, its own query tokens included
    :ivar cu_seqlens_q: ``[num_rows + 1]`` int32: row r has the query tokens ``cu_seqlens_q[r]:cu_seqlens_q[r + 1]``
    :ivar max_seqlen_q: upper bound of the query tokens per row
    :ivar max_context_len: upper bound of the context lengths; None: the capacity of the block tables
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_context_len: int | None

    def longest(self, block_size: int) -> int:
        """Return an upper bound of the context lengths, given the number of tokens per block."""
        return self.block_tables.shape[1] * block_size if self.max_context_len is None else self.max_context_len


@frozen(eq=False, kw_only=True)
class LearnedScores:
    """Holds what a layer has learned to add to its attention scores.

    :ivar sinks: see :attr:`ScoreOptions.sinks`
    :ivar relative: see :attr:`ScoreOptions.relative`
    """

    sinks: Tensor | None = None
    relative: RelativeBias | None = None


@frozen(eq=False, kw_only=True)
class ScoreOptions:
    """Describes how attention scores are computed, and which keys a query sees.

    :ivar scale: multiplies the scores
    :ivar window: number of keys that a query sees, its own included; None: all
    :ivar softcap: scores become ``softcap * tanh(score / softcap)``; None: no cap
    :ivar alibi_slopes: ``[num_heads]`` float32: adds ``slope * (key position - query position)`` to the scores, after
        the cap (Press et al., 2021, arXiv 2108.12409)
    :ivar sinks: ``[num_heads]`` float32: an extra logit without a value in each head's softmax (attention sinks; Xiao
        et al., 2023, arXiv 2309.17453; here learned); neither scaled nor capped
    :ivar relative: numbers added to the scores after the cap, by distance; None: none. Only
        :func:`~paged_sdk.kernels.attention.prefill_attention` supports them
    :ivar bidirectional: whether a query also sees later keys: the next ``window - 1``, or all without a window. Only
        :func:`~paged_sdk.kernels.attention.prefill_attention` supports it
    :raises ConfigError: a number is out of range
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    relative: RelativeBias | None = None
    bidirectional: bool = False

    def __attrs_post_init__(self) -> None:
        check_score_options(self.scale, self.window, self.softcap)

    def with_learned(self, learned: LearnedScores | None) -> ScoreOptions:
        """Return the same options with what a layer has learned to add to its scores; None: nothing."""
        return self if learned is None else evolve(self, sinks=learned.sinks, relative=learned.relative)

    def of_tokens(self, first: int, last: int) -> ScoreOptions:
        """Return the options of some of a step's tokens, ``first`` to ``last`` (exclusive)."""
        return self if self.relative is None else evolve(self, relative=self.relative.of_tokens(first, last))
