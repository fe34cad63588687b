"""Computes prefill attention with the FlashAttention built into torch ("FlashAttention-2", Dao, 2023, 2307.08691).

It reads contiguous keys. If all rows of a step begin their sequences, these are the step's own keys; otherwise keys are
gathered from their pages first, which costs a read and a write of each key, little compared to the work of all query
tokens of its row. Keys of an f8e4m3 cache are gathered and decoded in every step, because results must not depend on
where chunks begin.

Torch's alternatives are unsuitable. FlashAttention over block tables (torch 2.12 and later) only takes blocks of
multiples of 256 tokens, with kernels meant for decoding. cuDNN's attention aligns the causal mask at the first key,
where chunks need it at the last, and makes a new plan for every shape.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows
from paged_sdk.kernels.kv_cache import gather_decoded

__all__ = ["KeySpans", "PrefillRows", "VarlenAttention", "flash_prefill", "torch_flash", "why_not"]

_OLDEST: Final = (8, 0)
_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8

# Called directly: their wrapper, torch.nn.attention.varlen, takes a second to import and launches one more kernel.
_FORWARD: Final[Any] = torch.ops.aten._flash_attention_forward
_FORWARD_INTO: Final[Any] = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)  # torch 2.12


class VarlenAttention(Protocol):
    """Computes causal attention of each row over its own contiguous keys.

    Query token i of a row with n query tokens and L keys sees the keys 0 to L - n + i, or the last ``window`` of them.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        :param query: ``[num_tokens, num_heads, head_dim]``
        :param key: ``[num_keys, num_kv_heads, head_dim]``; ``value`` likewise
        :param cu_seqlens_q: ``[num_rows + 1]`` int32; ``cu_seqlens_k`` likewise
        :param max_seqlen_q: upper bound of the query tokens per row; ``max_seqlen_k`` likewise of keys
        :param out: like ``query``, written and returned; None: a new tensor
        """


def why_not(
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    *,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
) -> str | None:
    """Return why torch's FlashAttention cannot serve a layer, or None if it can. Sliding windows are supported.

    :param dtype: of queries
    """
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type!r}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {dtype}"
    if head_dim % _HEAD_MULTIPLE or head_dim > _LARGEST_HEAD:
        return f"it takes head sizes up to {_LARGEST_HEAD} that are multiples of {_HEAD_MULTIPLE}, not {head_dim}"
    for asked, what in ((softcap is not None, "softcap"), (alibi, "alibi"), (sinks, "sinks")):
        if asked:
            return f"it has no {what}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch comes without it"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return f"it needs compute capability 8.0 (Ampere) or newer, unlike {torch.cuda.get_device_name(device)}"
    return None


def torch_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with torch's FlashAttention; see :class:`VarlenAttention`. :func:`why_not` must have returned None.

    The elements of a head must be adjacent. If another implementation is active in torch
    (``torch.nn.attention.activate_flash_attention_impl``), torch calls that one.
    """
    arguments = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    dropout, causal, debug_mask = 0.0, window is None, False
    # The number of keys on each side of a token's own position; -1: all.
    sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    if out is not None and _FORWARD_INTO is not None:
        _FORWARD_INTO(out, *arguments, dropout, causal, debug_mask, scale=scale, **sides)
        return out
    output: Tensor = _FORWARD(*arguments, dropout, causal, debug_mask, scale=scale, **sides)[0]
    return output if out is None else out.copy_(output)


@frozen(eq=False)
class KeySpans:
    """Locates the keys that rows see, row by row.

    :ivar cu_seqlens: ``[num_rows + 1]`` int32: row r has the keys ``cu_seqlens[r]:cu_seqlens[r + 1]``
    :ivar slots: ``[num_keys]`` int64: the slot of each key in the cache; entries beyond the rows' keys repeat the last
        key
    :ivar positions: like ``slots``: the position of each key within its sequence
    :ivar max_seqlen: upper bound of the keys per row
    """

    cu_seqlens: Tensor
    slots: Tensor
    positions: Tensor
    max_seqlen: int


class PrefillRows:
    """Describes the prefill rows of a step, once for all layers, without waiting for the device.

    :param rows: rows with at least as many keys as query tokens; ``max_context_len`` must be given
    :param block_size: tokens per block
    :param num_tokens: query tokens of all rows
    :param total_context_len: upper bound of the sum of the context lengths
    :param begin_sequences: whether all rows begin their sequences, so that they see only their own tokens' keys
    """

    def __init__(
        self, rows: PagedRows, *, block_size: int, num_tokens: int, total_context_len: int, begin_sequences: bool
    ) -> None:
        assert rows.max_context_len is not None, rows
        self.rows = rows
        self.block_size = block_size
        self.num_tokens = num_tokens
        self.max_context_len: int = rows.max_context_len
        self.total_context_len = total_context_len
        self.begin_sequences = begin_sequences
        self._spans: dict[int | None, KeySpans] = {}
        self._gathered: dict[int | None, PagedRows] = {}

    def num_keys(self, window: int | None) -> int:
        """Return an upper bound of the number of keys that all rows see."""
        if window is None:
            return self.total_context_len
        return min(self.total_context_len, self.num_tokens + len(self.rows.context_lens) * (window - 1))

    def key_spans(self, window: int | None) -> KeySpans:
        """Return the locations of the keys that the rows see, computed on the device at the first call."""
        if window not in self._spans:
            self._spans[window] = self._find_keys(window)
        return self._spans[window]

    def over_gathered(self, window: int | None) -> PagedRows:
        """Return the same rows over keys gathered in the order of :meth:`key_spans`, as blocks of one key."""
        if window not in self._gathered:
            rows, ends = self.rows, self.key_spans(window).cu_seqlens[1:]
            position = torch.arange(self.max_context_len, dtype=torch.int32, device=ends.device)
            tables = (ends - rows.context_lens)[:, None] + position
            self._gathered[window] = evolve(rows, block_tables=tables)
        return self._gathered[window]

    def _find_keys(self, window: int | None) -> KeySpans:
        rows, longest = self.rows, self.max_context_len
        lengths = rows.context_lens
        if window is not None:
            lengths = torch.minimum(lengths, rows.cu_seqlens_q.diff() + (window - 1))
            longest = min(longest, rows.max_seqlen_q + window - 1)
        ends = lengths.cumsum(0)
        key = torch.arange(self.num_keys(window), device=ends.device).clamp(max=ends[-1] - 1)
        row = torch.searchsorted(ends, key, right=True)
        position = rows.context_lens[row] - (ends[row] - key)
        block = rows.block_tables[row, position // self.block_size].long()
        slots = block * self.block_size + position % self.block_size
        return KeySpans(
            cu_seqlens=F.pad(ends, (1, 0)).int(),
            slots=slots * (ends[-1] > 0),  # slot 0 if there are no keys, since block tables are arbitrary then
            positions=position.clamp(min=0),
            max_seqlen=longest,
        )


def flash_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    rows: PrefillRows,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    attend: VarlenAttention = torch_flash,
) -> Tensor:
    """Attend causally with a step's prefill rows over a paged cache that already holds their keys and values.

    :param query: ``[num_tokens, num_heads, head_dim]`` float16 or bfloat16, elements of heads adjacent
    :param key: ``[num_tokens, num_kv_heads, head_dim]``, of the rows' own tokens; ``value`` likewise
    :param cache: of the query's dtype or f8e4m3
    :param scale: multiplies the scores
    :param window: number of keys that a query sees, its own included; None: all
    :param out: like ``query``, written and returned; None: a new tensor
    :param attend: computes attention over contiguous keys
    :returns: ``[num_tokens, num_heads, head_dim]`` of the query's dtype
    """
    cu_seqlens_q, max_seqlen_q = rows.rows.cu_seqlens_q, rows.rows.max_seqlen_q
    cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q
    if cache.quantized or not rows.begin_sequences:
        spans = rows.key_spans(window)
        cu_seqlens_k, max_seqlen_k = spans.cu_seqlens, spans.max_seqlen
        if cache.quantized:
            key, value = gather_decoded(cache, spans.slots, spans.positions, query.dtype)
        else:
            # On CUDA, indexing copies 16 bytes at a time, index_select one element.
            key, value = (pages.flatten(0, 1)[spans.slots] for pages in (cache.key, cache.value))
    return attend(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        window=window,
        out=out,
    )
