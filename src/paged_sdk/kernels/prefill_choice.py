"""Chooses the prefill attention on a CUDA device: the Triton kernels, or torch's FlashAttention if it is faster.

For rows with many query tokens over an f8e4m3 cache, keys and values are first decoded to memory, once for all query
tiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.flash_prefill import PrefillRows, VarlenAttention, flash_prefill, torch_flash, why_not
from paged_sdk.kernels.fp8 import quantize_f8e4m3
from paged_sdk.kernels.kv_cache import gather_decoded
from paged_sdk.kernels.triton.availability import num_multiprocessors

__all__ = ["PagedPrefill", "PrefillShape", "compare_prefills", "faster_for_prefill", "microseconds"]

# Query tokens of one head in a FlashAttention tile. With fewer tiles than multiprocessors some of these would be idle,
# where the Triton kernels split long contexts among all of them.
_TILE: Final = 128
# Keys are decoded to memory first, instead of by each query tile, if rows have at least this many query tokens times
# query heads per KV head. Compiled for compute capability 9.0, 1,000 query-key products take 90 cycles with decoded
# keys and 164 with f8e4m3 keys, so 128 queries save 0.04 ns per key on an H100's 132 multiprocessors. Decoding a key
# and its value to memory moves 776 bytes: 0.23 ns, six times as much.
_WORTH_DECODING: Final = 768
# Limit on the keys and values gathered at once: 65,536 tokens of 8 heads of 128 elements in 16 bits. This memory is
# lost to KV blocks.
_MOST_GATHERED_BYTES: Final = 2**28

# (query tokens, context length) of rows whose results are compared. One continues a sequence, so keys are gathered.
_COMPARED_ROWS: Final = ((1024, 2048), (1024, 1024))
# Rows that are timed: enough that the device takes longer than the host takes to launch. On an H200 with 32 heads of
# 128 elements, Triton takes 0.1 ms for the rows above and torch 0.17, but launching took longer than either, and torch
# was chosen because it launches less.
_TIMED_ROWS: Final = ((4096, 8192),)
_ROUNDS: Final = 5
_CALLS: Final = 3  # in a row, so that the device does not wait for each launch
# Largest error of a head's output vector relative to its norm. Rounding to bfloat16 causes 2**-8; a missing or extra
# key causes about 1 in the first tokens, which see few keys.
_LARGEST_DIFFERENCE: Final = 2.0**-5
_WORTHWHILE: Final = 1.05  # times as fast; less may be timing noise


PagedAttentionKernel: TypeAlias = Callable[[Tensor, LayerCache, PagedRows, ScoreOptions], Tensor]
"""Computes paged attention, like :func:`~paged_sdk.kernels.paged_attention.paged_attention_reference`."""


@frozen(kw_only=True)
class PrefillShape:
    """Describes the properties of a layer's attention that the choice depends on.

    :ivar dtype: of queries
    :ivar scale: multiplies the scores; above 0
    :ivar window: number of keys that a query sees, its own included; None: all
    :ivar softcap: scores become ``softcap * tanh(score / softcap)``
    :ivar quantized: whether the cache is f8e4m3
    :ivar values_are_keys: whether only keys are kept, which are the values, too
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    window: int | None = None
    softcap: float | None = None
    quantized: bool = False
    values_are_keys: bool = False

    def window_of(self, rows: PrefillRows) -> int | None:
        """Return the window, or None if all contexts of the rows fit in it."""
        return None if self.window is None or self.window >= rows.max_context_len else self.window


@frozen(kw_only=True, eq=False)
class PagedPrefill:
    """Computes prefill attention with the kernel chosen for a layer shape. ``str()`` describes the choice for the log.

    :ivar shape: the layer shape
    :ivar paged: Triton's paged attention, for rows that ``flash`` does not serve
    :ivar flash: torch's FlashAttention if it is faster, else None
    :ivar reason: the reason for the choice
    """

    shape: PrefillShape
    paged: PagedAttentionKernel
    flash: VarlenAttention | None
    reason: str

    @property
    def name(self) -> str:
        """Return the name of the kernel that serves long prefills."""
        return "Triton" if self.flash is None else "torch flash"

    @property
    def most_gathered_bytes(self) -> int:
        """Return the most bytes that gathered keys and values may take."""
        return 0 if self.flash is None and not self.shape.quantized else _MOST_GATHERED_BYTES

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        rows: PrefillRows,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend over a cache to which the rows' keys and values are already written.

        :param query: ``[num_tokens, num_heads, head_dim]`` of the shape's dtype, elements of heads adjacent
        :param key: ``[num_tokens, num_kv_heads, head_dim]``: the rows' own keys, already rotated; ``value`` likewise
        :param out: like ``query``, written and returned; None: a new tensor
        :returns: ``[num_tokens, num_heads, head_dim]`` of the query's dtype
        """
        scale, window = self.shape.scale, self.shape.window_of(rows)
        suits, paged_rows = self.suits(rows), rows.rows
        if self.flash is not None and suits:
            return flash_prefill(query, key, value, cache, rows, scale=scale, window=window, out=out, attend=self.flash)
        if cache.quantized and suits:
            spans = rows.key_spans(window)
            key, value = (each[:, None] for each in gather_decoded(cache, spans.slots, spans.positions, query.dtype))
            value = key if cache.values_are_keys else value
            cache, paged_rows = LayerCache(key, value, key_only=cache.key_only), rows.over_gathered(window)
        scores = ScoreOptions(scale=scale, window=window, softcap=self.shape.softcap)
        output = self.paged(query, cache, paged_rows, scores)
        return output if out is None else out.copy_(output)

    def suits(self, rows: PrefillRows) -> bool:
        """Return whether to serve these rows here, instead of with the Triton kernels on the pages as they are."""
        shape = self.shape
        if self.flash is None and not shape.quantized:
            return False
        if rows.num_tokens * shape.num_heads < _TILE * num_multiprocessors(shape.device):
            return False
        if shape.quantized:
            seen = rows.num_tokens * (shape.num_heads // shape.num_kv_heads)
            if seen < _WORTH_DECODING * len(rows.rows.context_lens):
                return False
        elif rows.begin_sequences:
            return True
        elements_per_key = (1 if shape.values_are_keys else 2) * shape.num_kv_heads * shape.head_dim
        return rows.num_keys(shape.window_of(rows)) * elements_per_key * shape.dtype.itemsize <= _MOST_GATHERED_BYTES


def faster_for_prefill(shape: PrefillShape) -> PagedPrefill:
    """Time both kernels on prefill rows and return the faster one.

    Takes some 50 ms and 150 MB of the device; called once per layer shape when an engine starts. If torch's
    FlashAttention raises, Triton is chosen and nothing is raised.

    :param shape: a layer shape that the Triton kernels serve
    """
    from paged_sdk.kernels.triton.paged_attention import paged_attention

    refusal = why_not(shape.dtype, shape.head_dim, shape.device, softcap=shape.softcap)
    if shape.values_are_keys:
        refusal = "it takes keys and values, not latent vectors"
    if refusal is not None:
        return _only_paged(shape, paged_attention, refusal)
    return compare_prefills(shape, paged_attention, torch_flash, partial(microseconds, device=shape.device))


def compare_prefills(
    shape: PrefillShape,
    paged: PagedAttentionKernel,
    flash: VarlenAttention,
    time: Callable[[Callable[[], Tensor]], float],
) -> PagedPrefill:
    """Choose ``flash`` if its results agree with those of ``paged`` and it is faster, else ``paged``.

    :param time: measures the duration of a call
    """
    try:
        by_paged, by_flash = _both_calls(shape, paged, flash, _COMPARED_ROWS)
        difference = _difference(by_flash(), by_paged())
        by_paged, by_flash = _both_calls(shape, paged, flash, _TIMED_ROWS)
        speed = time(by_paged) / time(by_flash)
    except Exception as error:
        message = next(iter(str(error).splitlines()), "no message")
        return _only_paged(shape, paged, f"{type(error).__name__}: {message}")
    if not difference <= _LARGEST_DIFFERENCE:  # also true for NaN
        return _only_paged(shape, paged, f"its results differ, by {difference:.1%} of a vector")
    if speed < _WORTHWHILE:
        return _only_paged(shape, paged, f"{speed:.2f} x as fast")
    return PagedPrefill(shape=shape, paged=paged, flash=flash, reason=f"{speed:.2f} x as fast as Triton")


def _both_calls(
    shape: PrefillShape, paged: PagedAttentionKernel, flash: VarlenAttention, rows_of: Sequence[tuple[int, int]]
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return a call of ``paged`` and one of ``flash`` on the same random rows of these query tokens and contexts."""
    batch = _random_batch(shape, rows_of)
    by_paged = partial(_only_paged(shape, paged, "being timed"), *batch)
    window, out = shape.window_of(batch[-1]), torch.empty_like(batch[0])
    return by_paged, partial(flash_prefill, *batch, scale=shape.scale, window=window, out=out, attend=flash)


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Measure the duration of a call on a CUDA device, as the median of some rounds; wait for the device."""
    stream = torch.cuda.current_stream(device)
    event: Any = torch.cuda.Event  # it has no annotations
    times: list[float] = []
    call()  # compiles kernels
    for _ in range(_ROUNDS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record(stream)
        for _ in range(_CALLS):
            call()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / _CALLS)
    return statistics.median(times)


def _only_paged(shape: PrefillShape, paged: PagedAttentionKernel, why_not_flash: str) -> PagedPrefill:
    return PagedPrefill(shape=shape, paged=paged, flash=None, reason=f"torch flash: {why_not_flash}")


def _random_batch(
    shape: PrefillShape, rows_of: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor, LayerCache, PrefillRows]:
    """Return arguments of a :class:`PagedPrefill` for timing: random vectors, and blocks in random order.

    :param rows_of: query tokens and context length of each row
    """
    device = shape.device
    generator = torch.Generator(device).manual_seed(0)
    counts, lengths = zip(*rows_of, strict=True)
    blocks_of_row = -(-max(lengths) // shape.block_size)
    num_blocks = len(counts) * blocks_of_row
    tables = torch.randperm(num_blocks, generator=generator, device=device).int().view(len(counts), blocks_of_row)
    rows = PrefillRows(
        PagedRows(
            block_tables=tables,
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            max_seqlen_q=max(counts),
            max_context_len=max(lengths),
        ),
        block_size=shape.block_size,
        num_tokens=sum(counts),
        total_context_len=sum(lengths),
        begin_sequences=False,
    )
    random = partial(torch.randn, generator=generator, dtype=shape.dtype, device=device)
    pages = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    cache = LayerCache(random(pages), random(pages))
    key, value = (each.flatten(0, 1)[: rows.num_tokens] for each in cache.tensors)  # not read
    if shape.quantized:
        (codes, k_scale), (more_codes, v_scale) = map(quantize_f8e4m3, cache.tensors)
        cache = LayerCache(codes, more_codes, k_scale, v_scale)
    return random(rows.num_tokens, shape.num_heads, shape.head_dim), key, value, cache, rows


def _difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest error of a head's output vector, relative to the vector's norm."""
    error = (output.float() - expected.float()).norm(dim=-1)
    return float((error / expected.float().norm(dim=-1)).max())
