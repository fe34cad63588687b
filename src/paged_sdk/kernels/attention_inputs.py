"""Holds the inputs of paged attention beside its queries: a layer's pages, a batch's rows and the score options.

The public functions take tensors one by one, as torch.library wants them; the code behind them takes these values.
"""

from __future__ import annotations

from enum import IntEnum

from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.checks import check_pages, check_score_options
from paged_sdk.kernels.key_offsets import check_key_offsets

__all__ = ["LayerCache", "PagedRows", "Products", "ScoreOptions"]


class Products(IntEnum):
    """Names what attention on the CPU may multiply. Fewer bits are used where the processor is faster with them; sums
    are exact or float32 in any case.
    """

    FLOAT32 = 0
    """Float32 numbers for every token."""

    BFLOAT16 = 1
    """Queries, keys, weights and values that are rounded to bfloat16: twice as fast on AVX-512 with BF16. On AVX2,
    codes of 16 bits for many tokens of a sequence, which are closer, and some 1.5 times as fast.
    """

    INT8 = 2
    """Codes of 8 bits, with a scale for each vector, for many tokens of a sequence: four times as fast on AVX-512 with
    VNNI. For few tokens, bfloat16. On AVX2, and where there is a matrix unit (AMX), as :attr:`BFLOAT16`.
    """


@frozen(eq=False)
class LayerCache:
    """Holds the pages of one layer's KV cache.

    :ivar key: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the queries' dtype or float8_e4m3fn, contiguous
    :ivar value: likewise
    :ivar k_scale: ``[num_blocks, block_size, num_kv_heads]`` float32, of an f8e4m3 cache only
    :ivar v_scale: likewise
    :ivar key_offsets: ``[num_spans, num_kv_heads, head_dim]`` float32, of an f8e4m3 cache only: what was subtracted
        from the keys before they were stored (:mod:`paged_sdk.kernels.key_offsets`), at least as far as the longest
        context; None: nothing
    :raises ConfigError: shapes, dtypes, strides or devices do not fit each other
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    key_offsets: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        check_pages(self.key, self.value, self.k_scale, self.v_scale)
        check_key_offsets(self.key_offsets, self.key, 0)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors whose first dimension is the block: pages and their scales."""
        return [each for each in (self.key, self.value, self.k_scale, self.v_scale) if each is not None]

    @property
    def block_size(self) -> int:
        """Return how many tokens a block holds."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Return how many heads keys and values have."""
        return self.key.shape[2]

    @property
    def quantized(self) -> bool:
        """Say whether keys and values are f8e4m3, with scales."""
        return self.k_scale is not None


@frozen(eq=False, kw_only=True)
class PagedRows:
    """Describes a batch of rows, each of which is some consecutive tokens of a sequence.

    :func:`~paged_sdk.kernels.paged_attention.paged_attention` says which keys each token sees.

    :ivar block_tables: ``[num_rows, max_blocks]`` int32
    :ivar context_lens: ``[num_rows]`` int32: keys of each row, its own query tokens included
    :ivar cu_seqlens_q: ``[num_rows + 1]`` int32: row r has the query tokens ``cu_seqlens_q[r]:cu_seqlens_q[r + 1]``
    :ivar max_seqlen_q: at least the most query tokens of a row
    :ivar max_context_len: at least the largest context length; None: what the block tables hold
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_context_len: int | None

    def longest(self, block_size: int) -> int:
        """Return an upper bound of the context lengths, given how many tokens a block holds."""
        return self.block_tables.shape[1] * block_size if self.max_context_len is None else self.max_context_len


@frozen(eq=False, kw_only=True)
class ScoreOptions:
    """Says how a query's scores are computed, and which keys have one.

    :ivar scale: multiplies the scores
    :ivar window: keys that a query sees, its own included; None: all
    :ivar softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay
    :ivar alibi_slopes: ``[num_heads]`` float32: adds ``slope * (key position - query position)`` to the scores, after
        the cap (Press et al., 2021, arXiv 2108.12409)
    :ivar sinks: ``[num_heads]`` float32: one more logit in each head's softmax, which has no value (Xiao et al., 2023,
        arXiv 2309.17453, as learned numbers); neither scaled nor capped
    :ivar both_ways: whether a query sees later keys too, a window's worth of them; of torch's attention over prompts
        alone
    :raises ConfigError: one of the numbers cannot be used
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    both_ways: bool = False

    def __attrs_post_init__(self) -> None:
        check_score_options(self.scale, self.window, self.softcap)

    def with_sinks(self, sinks: Tensor | None) -> ScoreOptions:
        """Return the same options with these sinks; None: those that they have."""
        return self if sinks is None else evolve(self, sinks=sinks)
