"""Computes attention over a paged KV cache, read in place; decodes and prefill chunks form one varlen batch.

Keys are processed in spans of 128 at fixed positions, so a token's result does not depend on the batch, the chunking or
the number of threads. :attr:`AttentionShape.precision` describes the exception.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import float_vector, pointer
from paged_sdk.kernels.native.recurrent import NativeRecurrentRows
from paged_sdk.kernels.native.structures import DTYPES
from paged_sdk.kernels.native.structures_attention import Attention, Batch, Cache, Heads

__all__ = [
    "MAX_FEW_TOKENS",
    "AttentionShape",
    "NativeRows",
    "VarlenBatch",
    "cumulated",
    "describe_batch",
    "describe_cache",
    "describe_heads",
    "native_paged_attention",
]

MAX_FEW_TOKENS: Final = 8
"""The keys of a sequence with up to this many query tokens are split among threads (``kSplitTokens`` in the kernels).
"""


@frozen
class AttentionShape:
    """Describes the heads of one layer, and how their scores are computed.

    :ivar num_heads: query heads, a multiple of ``num_kv_heads``
    :ivar head_dim: a multiple of 16
    :ivar scale: multiplies the scores
    :ivar window: number of keys that a query sees, its own included; None: all
    :ivar window_reaches_ahead: whether the window also limits the later keys that tokens of
        :attr:`VarlenBatch.bidirectional_from` sequences see, to ``window - 1``; False: they see all
    :ivar softcap: scores become ``softcap * tanh(score / softcap)``; None: no cap
    :ivar precision: the lowest in which to multiply. Except with float32, sequences with up to ``MAX_FEW_TOKENS`` query
        tokens are rounded differently from longer ones and from those marked by :attr:`VarlenBatch.in_chunks`
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    window_reaches_ahead: bool = False
    softcap: float | None = None
    precision: Precision = Precision.FLOAT32

    def __attrs_post_init__(self) -> None:
        if self.head_dim < 16 or self.head_dim % 16:
            raise ConfigError.of("head_dim", self.head_dim, "a multiple of 16")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError.of("num_heads", self.num_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")


def cumulated(lengths: Tensor) -> Tensor:
    """Return the cumulative lengths, starting with 0, int32: ``[n + 1]`` for ``n`` lengths."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


_MARKS: Final = (
    ("in_chunks", torch.uint8, "uint8"),
    ("bidirectional_from", torch.int32, "int32"),
    ("decompressed", torch.uint8, "uint8"),
)
"""What a batch may say of each sequence, in the order of its fields."""


@frozen(eq=False)
class VarlenBatch:
    """Maps query tokens to sequences, and sequences to blocks.

    :ivar cu_seqlens_q: [num_seqs + 1] int32: sequence s has query tokens ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``,
        the last of its context
    :ivar block_tables: [num_seqs, max_blocks] int32, contiguous; entries of blocks that no token sees are not read
    :ivar context_lens: [num_seqs] int32: keys of each sequence, the query tokens' own included
    :ivar in_chunks: [num_seqs] uint8: 1 if a sequence's tokens are computed as those of a long chunk even if they are
        few, so that results do not depend on where a prompt was cut; None: all 0
    :ivar bidirectional_from: [num_seqs] int32: the position from which on every query token of a sequence sees all its
        keys, later ones and those before the window included, as within an image; -1: causal. None: all causal
    :ivar decompressed: [num_seqs] uint8: 1 if a sequence attends over keys and values that are made of latent vectors,
        in decoder layers that have these; None: all 0
    """

    cu_seqlens_q: Tensor
    block_tables: Tensor
    context_lens: Tensor
    in_chunks: Tensor | None = None
    bidirectional_from: Tensor | None = None
    decompressed: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("cu_seqlens_q", "block_tables", "context_lens"):
            tensor: Tensor = getattr(self, name)
            if not _is_vector(tensor, torch.int32):
                raise ConfigError.of(name, tensor.dtype, "a contiguous int32 tensor in CPU memory")
        count = self.context_lens.numel()
        if self.cu_seqlens_q.numel() != count + 1 or self.block_tables.shape[:-1] != (count,):
            shapes = [tuple(t.shape) for t in (self.cu_seqlens_q, self.block_tables, self.context_lens)]
            raise ConfigError.of("batch shapes", shapes, "[num_seqs + 1], [num_seqs, max_blocks], [num_seqs]")
        for name, dtype, kind in _MARKS:
            marks: Tensor | None = getattr(self, name)
            if marks is not None and not (_is_vector(marks, dtype) and marks.shape == (count,)):
                raise ConfigError.of(name, f"{marks.dtype} {tuple(marks.shape)}", f"{kind} ({count},) in CPU memory")

    def part(self, sequences: Tensor) -> tuple[Tensor, VarlenBatch]:
        """Select sequences.

        :param sequences: [num_seqs] bool: the selected sequences
        :returns: the indices of their tokens in this batch, int64, and a batch of these sequences only
        """
        lengths = self.cu_seqlens_q.diff()
        tokens = sequences.repeat_interleave(lengths).nonzero().flatten()
        cu_seqlens_q, tables = cumulated(lengths[sequences]), self.block_tables[sequences]
        given: list[Tensor | None] = [getattr(self, name) for name, *_ in _MARKS]
        marks = (None if each is None else each[sequences] for each in given)
        return tokens, VarlenBatch(cu_seqlens_q, tables, self.context_lens[sequences], *marks)


@frozen(eq=False)
class NativeRows:
    """Holds the rows of one step.

    :ivar slots: [num_tokens] int64: slots of the tokens' keys and values, ``block * block_size + offset``
    :ivar batch: the rows as a batch. Prompt tokens are in rows that ``in_chunks`` marks, generated tokens in others; a
        sequence with both in one step has several rows
    :ivar num_generating: number of the step's sequences that compute generated tokens
    :ivar cu_seqlens_read: [num_seqs + 1] int32: of row s, only the hidden states of the last ``cu_seqlens_read[s + 1] -
        cu_seqlens_read[s]`` tokens are read; None: all are read
    :ivar states: the same tokens by the states of their sequences, in models with recurrent layers; None: there are
        none
    """

    slots: Tensor
    batch: VarlenBatch
    num_generating: int
    cu_seqlens_read: Tensor | None = None
    states: NativeRecurrentRows | None = None

    def use_few(self, few_rows: int) -> bool:
        """Return whether generated tokens use the weights' form for few rows: if 1 to ``few_rows`` sequences generate.
        Prompt tokens never use it.
        """
        return 0 < self.num_generating <= few_rows

    def of_prompts(self) -> Tensor:
        """Return which of the step's tokens are prompt tokens, [num_tokens] bool."""
        marks, lengths = self.batch.in_chunks, self.batch.cu_seqlens_q.diff()
        return (
            torch.zeros(len(self.slots), dtype=torch.bool) if marks is None else marks.bool().repeat_interleave(lengths)
        )

    def parts(self) -> list[tuple[Tensor, NativeRows]]:
        """Split the rows into those of prompt tokens and those of generated tokens, each with its tokens' indices.

        Prompts come first, since a sequence's generated tokens attend to its prompt.
        """
        marks = self.batch.in_chunks
        assert marks is not None
        prompts = marks.bool()
        return [self._part(prompts, 0), self._part(~prompts, self.num_generating)]

    def _part(self, sequences: Tensor, num_generating: int) -> tuple[Tensor, NativeRows]:
        tokens, batch = self.batch.part(sequences)
        read = None if self.cu_seqlens_read is None else cumulated(self.cu_seqlens_read.diff()[sequences])
        states = None
        if self.states is not None:
            selected = torch.zeros(len(self.slots), dtype=torch.bool)
            selected[tokens] = True
            states = self.states.part(selected)
        return tokens, NativeRows(self.slots[tokens], batch, num_generating, read, states)


def _is_vector(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"


def describe_heads(shape: AttentionShape, cache: LayerCache) -> Heads:
    """Fill the C structure of a layer's heads."""
    if (cache.num_kv_heads, cache.head_dim) != (shape.num_kv_heads, shape.head_dim):
        raise ConfigError.of(
            "cache shape", tuple(cache.key.shape), f"[..., {shape.num_kv_heads}, {shape.head_dim}] for these heads"
        )
    if cache.key.dtype not in DTYPES:
        raise ConfigError.of("cache dtype", cache.key.dtype, "float32, bfloat16, float16, float8_e4m3fn or uint8")
    return Heads(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=cache.key.shape[1],
        cache_dtype=DTYPES[cache.key.dtype],
        window=shape.window or 0,
        window_reaches_ahead=shape.window_reaches_ahead,
        scale=shape.scale,
        softcap=shape.softcap or 0.0,
        products=shape.precision,
    )


def describe_cache(cache: LayerCache) -> Cache:
    """Fill the C structure of a layer's pages, without a change of basis; the tensors must outlive it."""
    return Cache(
        key=cache.key.data_ptr(),
        value=cache.value.data_ptr(),
        key_scale=pointer(cache.k_scale),
        value_scale=pointer(cache.v_scale),
        key_offsets=pointer(cache.key_offsets),
    )


def describe_batch(batch: VarlenBatch) -> Batch:
    """Fill the C structure of a batch; the tensors must outlive it."""
    return Batch(
        cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        in_chunks=pointer(batch.in_chunks),
        bidirectional_from=pointer(batch.bidirectional_from),
        decompressed=pointer(batch.decompressed),
        num_seqs=batch.context_lens.numel(),
        max_blocks=batch.block_tables.shape[-1],
    )


def native_paged_attention(
    workspace: Workspace,
    query: Tensor,
    cache: LayerCache,
    batch: VarlenBatch,
    shape: AttentionShape,
    *,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with every query token over its sequence's keys, causally except where ``batch.bidirectional_from`` says.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param query: [num_tokens, num_heads, head_dim] float32, bfloat16 or float16, in the basis of the cache; each
        token's heads contiguous
    :param out: likewise, a new tensor by default
    :param sinks: [num_heads], an extra logit without a value in each head's softmax; None: no sinks
    :returns: ``out``
    :raises ConfigError: shapes, dtypes or strides do not fit
    """
    expected = (shape.num_heads, shape.head_dim)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    for name, rows in (("query", query), ("out", out)):
        if rows.dim() != 3 or rows.shape[1:] != expected or rows.stride()[1:] != (shape.head_dim, 1):
            raise ConfigError.of(f"{name}.shape", tuple(rows.shape), f"[num_tokens, {expected[0]}, {expected[1]}]")
        if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16) or rows.dtype != query.dtype:
            due = "float32, bfloat16 or float16, the same for query and output"
            raise ConfigError.of(f"{name}.dtype", rows.dtype, due)
    sinks = float_vector("sinks", sinks, shape.num_heads)
    heads = describe_heads(shape, cache)
    heads.sinks = pointer(sinks)
    args = Attention(
        query=query.data_ptr(),
        out=out.data_ptr(),
        workspace=workspace.handle,
        query_stride=query.stride(0),
        out_stride=out.stride(0),
        heads=heads,
        cache=describe_cache(cache),
        batch=describe_batch(batch),
        dtype=DTYPES[query.dtype],
        num_threads=workspace.num_threads,
    )
    if workspace.library.functions.paged_attention(workspace.library.level, byref(args)):
        raise MemoryError("no memory for the scratch of native attention")
    return out
