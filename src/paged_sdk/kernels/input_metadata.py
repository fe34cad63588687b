"""Describes a batch for attention: the sequences of its tokens, and where their keys and values are stored."""

from __future__ import annotations

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import PagedRows
from paged_sdk.kernels.flash_prefill import PrefillRows

__all__ = ["InputMetadata"]


@frozen(eq=False)
class InputMetadata:
    """Describes a batch of tokens. It is made once per step and used by every layer.

    Tensors are int32 or int64, on one device. The tokens of all sequences follow one another without padding.

    **Decode** (``is_prefill=False``): one query token per sequence. ``block_tables`` and ``context_lens`` are required.

    **Prefill** (``is_prefill=True``): any number of query tokens per sequence, including single ones of decoding
    sequences. With ``block_tables``, tokens attend to their sequence's keys in the cache, their own included. Without,
    they attend to the given keys only.

    ``cu_seqlens_q`` has one entry more than there are rows. A row is a sequence or a part of one: a long prompt may be
    given as several chunks, which all see the tokens before them. Each row has its own row of the block tables and its
    own context length. If there is *one* row of block tables for several rows of ``cu_seqlens_q``, these are
    consecutive chunks of one sequence; if there is then also *one* context length, it is that of the last chunk, and
    the others follow from it.

    :ivar is_prefill: see above
    :ivar slot_mapping: ``[num_tokens]``: where to write each token's key and value, ``block * block_size + offset``;
        negative: nowhere (padding)
    :ivar block_tables: ``[num_rows, max_blocks]``: the blocks of each row's sequence, in order; entries beyond its
        context length are arbitrary
    :ivar context_lens: ``[num_rows]``: number of keys of each row, its own tokens and all before them
    :ivar cu_seqlens_q: ``[num_rows + 1]``: row r has the tokens ``cu_seqlens_q[r]:cu_seqlens_q[r + 1]``. None: each
        token is a row (decode), or all are one sequence (prefill)
    :ivar cu_seqlens_k: ``[num_rows + 1]``. With block tables: the cumulative context lengths, if ``context_lens`` is
        None. Without: row r attends to the given keys ``cu_seqlens_k[r]:cu_seqlens_k[r + 1]``, the last of which are
        its own; None: as ``cu_seqlens_q``
    :ivar max_seqlen_q: upper bound of the query tokens per row; None: all tokens. Kernels size their launch by it,
        without waiting for the device
    :ivar max_seqlen_k: likewise for keys, without block tables
    :ivar max_context_len: upper bound of the context lengths; None: as much as the block tables can hold
    :ivar rows: the batch in the form that the ops take, computed once
    :raises ConfigError: arguments that do not fit together
    """

    is_prefill: bool
    slot_mapping: Tensor
    block_tables: Tensor | None = None
    context_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    max_context_len: int | None = None
    rows: PagedRows = field(init=False, repr=False)
    _prefill_rows: dict[int, PrefillRows] = field(init=False, repr=False, factory=dict)

    def prefill_rows(self, num_tokens: int, block_size: int) -> PrefillRows:
        """Return the batch as torch's FlashAttention takes it, made at the first call and cached.

        The total number of keys is known only on the device, so an upper bound is used.

        :param num_tokens: query tokens of all rows
        :param block_size: of the caches; 1 without caches
        """
        if block_size not in self._prefill_rows:
            longest = self.rows.longest(block_size)
            self._prefill_rows[block_size] = PrefillRows(
                evolve(self.rows, max_context_len=longest),
                block_size=block_size,
                num_tokens=num_tokens,
                total_context_len=longest * len(self.rows.context_lens),
                begin_sequences=self.block_tables is None and self.cu_seqlens_k is None,
            )
        return self._prefill_rows[block_size]

    @rows.default
    def _make_rows(self) -> PagedRows:
        num_tokens = _integers("slot_mapping", self.slot_mapping, "[num_tokens]").numel()
        device = self.slot_mapping.device
        for name in ("block_tables", "context_lens", "cu_seqlens_q", "cu_seqlens_k"):
            tensor: object = getattr(self, name)
            if isinstance(tensor, Tensor) and tensor.device != device:
                raise ConfigError.of(f"{name}.device", str(tensor.device), f"{device}, where slot_mapping is")
        if not self.is_prefill:
            return self._decode_rows(num_tokens)
        ends = torch.arange(2, dtype=torch.int32, device=device) * num_tokens
        if self.cu_seqlens_q is not None:
            ends = _integers("cu_seqlens_q", self.cu_seqlens_q, "[num_rows + 1]").int()
        if self.block_tables is None:
            return self._uncached_rows(ends, num_tokens)
        return self._cached_rows(ends, num_tokens)

    def _decode_rows(self, num_tokens: int) -> PagedRows:
        if self.cu_seqlens_q is not None:
            allowed = "None for decodes, which have one query token each: is_prefill=True takes any batch"
            raise ConfigError.of("cu_seqlens_q", tuple(self.cu_seqlens_q.shape), allowed)
        ends = torch.arange(num_tokens + 1, dtype=torch.int32, device=self.slot_mapping.device)
        return self._cached_rows(ends, 1)

    def _cached_rows(self, ends: Tensor, max_seqlen_q: int) -> PagedRows:
        num_rows = ends.numel() - 1
        tables = _integers("block_tables", self.block_tables, "[num_rows, max_blocks]").int()
        lengths = self._context_lens()
        if self.is_prefill and len(tables) == 1 < num_rows:
            tables = tables.expand(num_rows, -1)
            if lengths.numel() == 1:
                lengths = lengths - (ends[-1] - ends[1:])
        for name, tensor in (("block_tables", tables), ("context_lens", lengths)):
            if len(tensor) != num_rows:
                raise ConfigError.of(f"{name}.shape", tuple(tensor.shape), f"one entry for each of {num_rows} rows")
        return PagedRows(
            block_tables=tables.contiguous(),
            context_lens=lengths,
            cu_seqlens_q=ends,
            max_seqlen_q=self.max_seqlen_q if self.is_prefill and self.max_seqlen_q is not None else max_seqlen_q,
            max_context_len=self.max_context_len,
        )

    def _context_lens(self) -> Tensor:
        if self.context_lens is None and self.cu_seqlens_k is not None:
            return _integers("cu_seqlens_k", self.cu_seqlens_k, "[num_rows + 1]").int().diff()
        return _integers("context_lens", self.context_lens, "[num_rows], required with block tables").int()

    def _uncached_rows(self, ends: Tensor, num_tokens: int) -> PagedRows:
        key_ends = ends
        if self.cu_seqlens_k is not None:
            if self.cu_seqlens_q is None:
                raise ConfigError.of("cu_seqlens_q", None, "a tensor [num_rows + 1], as there is cu_seqlens_k")
            key_ends = _integers("cu_seqlens_k", self.cu_seqlens_k, "[num_rows + 1]").int()
        lengths = key_ends.diff()
        if self.context_lens is not None:
            given = _integers("context_lens", self.context_lens, "[num_rows]")
            if given.shape != lengths.shape or (given.device.type == "cpu" and not torch.equal(given.int(), lengths)):
                allowed = "block tables, as context_lens differ from the keys that are given"
                raise ConfigError.of("block_tables", None, allowed)
        longest = num_tokens if self.max_seqlen_k is None else self.max_seqlen_k
        return PagedRows(
            block_tables=key_ends[:-1, None] + torch.arange(longest, dtype=torch.int32, device=ends.device),
            context_lens=lengths,
            cu_seqlens_q=ends,
            max_seqlen_q=num_tokens if self.max_seqlen_q is None else self.max_seqlen_q,
            max_context_len=longest,
        )


def _integers(name: str, value: Tensor | None, shape: str) -> Tensor:
    """Check that a value is an int32 or int64 tensor with the right number of dimensions, and return it.

    :param shape: the expected shape in words, such as ``[num_rows, max_blocks]``; dimensions are counted by its commas
    :raises ConfigError: the value is something else
    """
    given: object = value
    if isinstance(value, Tensor):
        if value.dtype in (torch.int32, torch.int64) and value.dim() == shape.partition("]")[0].count(",") + 1:
            return value
        given = f"{value.dtype} {tuple(value.shape)}"
    raise ConfigError.of(name, given, f"an int32 or int64 tensor {shape}")
