"""Computes attention of a tile of queries over a range of pages, one tile of keys at a time, for both paged kernels.

The softmax is the online softmax of Dao, "FlashAttention-2" (2023), in base 2: scores are multiplied by ``log2(e)``, so
that ``exp2``, one hardware instruction, replaces ``exp``.

Rows of a query tile are (token, head) pairs of one KV head, all heads of a token before the next token. A tile may
begin between two heads of a token, so no row is idle for any group size, and each key is loaded once per group.

A key that is also the value (latent attention: DeepSeek-AI, 2024, arXiv 2405.04434) is loaded once for both products.
Its first elements, which belong to the key alone, have a tile of their own: 64 and 512 elements waste nothing, where
576 in one tile would take 1,024.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from attrs import frozen

from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.triton.attention_codes import Decoder, fit_query, split_codes

__all__ = [
    "SPAN",
    "HeadPages",
    "Queries",
    "RunningSoftmax",
    "Scoring",
    "Tile",
    "attend",
    "joined",
    "load_query",
    "no_sums",
    "normalize",
    "offset_columns",
]

SPAN: tl.constexpr = tl.constexpr(KEY_SPAN)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
INTEGER: tl.constexpr = tl.constexpr(int(Decoder.INTEGER))
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)
LARGEST_SCALE: tl.constexpr = tl.constexpr(2.0**100)
OFFSET_UNIT: tl.constexpr = tl.constexpr(2.0**-6)


@frozen
class Tile:
    """Describes the tile sizes of a kernel.

    :ivar block_m: query rows, a power of two, at least 16, the minimum of a matrix instruction
    :ivar block_n: keys, a power of two, 16 to 128, so that a tile is within one span of ``key_offsets``
    :ivar num_warps: warps per program
    :ivar num_stages: tiles of keys and values in flight at once
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Queries(NamedTuple):
    """Holds a tile of queries.

    :ivar rows: see :func:`load_query`; ``factor`` likewise
    :ivar position: ``[block_m]`` int32
    :ivar slope: ``[block_m]`` float32 or None: ALiBi
    """

    rows: tl.tuple
    factor: tl.tensor
    position: tl.tensor
    slope: tl.tensor


class HeadPages(NamedTuple):
    """Locates the keys and values of one sequence and KV head.

    It is made in the call that takes it: assigned to a variable, its constants would become tensors (Triton 3.6).

    :ivar key_cache: pointer to the KV head's elements; ``value_cache``, ``k_scale``, ``v_scale``, ``key_offsets``
        likewise. No value cache: keys are the values, too, from element ``key_only`` on, and their scales
    :ivar block_table: pointer to the sequence's table
    :ivar decoder: None: keys and values are not quantized
    """

    key_cache: tl.tensor
    value_cache: tl.tensor
    k_scale: tl.tensor
    v_scale: tl.tensor
    key_offsets: tl.tensor
    offset_stride: tl.tensor
    block_table: tl.tensor
    block_stride: tl.constexpr
    slot_stride: tl.constexpr
    scale_block_stride: tl.constexpr
    scale_slot_stride: tl.constexpr
    block_size: tl.constexpr
    head_dim: tl.constexpr
    key_only: tl.constexpr
    decoder: tl.constexpr


class Scoring(NamedTuple):
    """Says how products of queries and keys become scores.

    :ivar softcap: see :class:`~paged_sdk.kernels.attention_inputs.ScoreOptions`, also for ``window``; None: none
    """

    scale: tl.tensor
    softcap: tl.tensor
    window: tl.tensor


class RunningSoftmax(NamedTuple):
    """Holds the softmax of a tile of queries over the keys so far.

    :ivar sums: float32, the sum of values so far, weighted by ``exp2(score - peak)``: a tile for each of values
    :ivar peak: ``[block_m]`` float32: -inf before the first visible key, then about the greatest score so far; for a
        quantized cache, the greatest sum of a score and the logarithm of its value's scale
    :ivar total: float32, the sum of the weights: ``[block_m]``, or ``[block_m, block_n]`` still to be added up
    """

    sums: tl.tuple
    peak: tl.tensor
    total: tl.tensor


@triton.jit
def load_query(
    query: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    valid: tl.tensor,
    head_dim: tl.constexpr,
    key_only: tl.constexpr,
    padded_size: tl.constexpr,
    padded_key_only: tl.constexpr,
    decoder: tl.constexpr,
    upcast: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:
    """Load a tile of queries; invalid rows and padding are zero.

    :param key_only: number of first elements that meet no element of a value
    :param padded_size: padded number of the other elements; ``padded_key_only`` likewise of these
    :param decoder: None: keys are not quantized
    :returns: the rows ``[block_m, padded_size]``, or for a quantized cache their even and odd elements, then likewise
        the elements of keys only, if there are any; and the number that each row was divided by, ``[block_m]`` float32
    """
    row = query + token * token_stride + head * head_stride
    rows = _load_elements(row + key_only, valid, head_dim - key_only, padded_size, decoder)
    if key_only > 0:
        rows += _load_elements(row, valid, key_only, padded_key_only, decoder)
    if decoder is not None:
        rows, factor = fit_query(rows, decoder)
        return rows, factor
    else:  # noqa: RET505 - without else, Triton would compile this after the return too
        if upcast:
            rows = converted(rows, tl.float32)
        return rows, tl.full(row.shape, 1.0, tl.float32)


@triton.jit
def _load_elements(
    row: tl.tensor, valid: tl.tensor, size: tl.constexpr, padded_size: tl.constexpr, decoder: tl.constexpr
) -> tl.tuple:
    """Load a tile of ``size`` elements of each row, or for a quantized cache one of even and one of odd elements."""
    if decoder is None:
        dim = tl.arange(0, padded_size)
        mask = valid[:, None] & (dim < size)[None, :]
        return (tl.load(row[:, None] + dim[None, :], mask=mask, other=0.0),)
    else:  # noqa: RET505 - without else, Triton would compile this after the return too
        pair = tl.arange(0, padded_size // 2)
        mask = valid[:, None] & (pair < size // 2)[None, :]
        even = row[:, None] + 2 * pair[None, :]
        return tl.load(even, mask=mask, other=0.0), tl.load(even + 1, mask=mask, other=0.0)


@triton.jit
def converted(tiles: tl.tuple, dtype: tl.constexpr) -> tl.tuple:
    """Convert tiles to a dtype."""
    result: tl.tuple = ()
    for i in tl.static_range(len(tiles)):
        result += (tiles[i].to(dtype),)
    return result


@triton.jit
def no_sums(block_m: tl.constexpr, padded_size: tl.constexpr, decoder: tl.constexpr) -> tl.tuple:
    """Return initial sums of zero, for as many tiles as values have."""
    if decoder is None:
        return (tl.zeros((block_m, padded_size), tl.float32),)
    else:  # noqa: RET505 - without else, Triton would compile this after the return too
        half = tl.zeros((block_m, padded_size // 2), tl.float32)
        return (half, half)


@triton.jit
def offset_columns(pointers: tl.tensor, mask: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Load a key offset as columns of a matrix instruction's second operand: one column has the offset rounded to the
    dtype, one the rest, and the others (the instruction takes at least eight) are zero. Compiled for compute capability
    9.0, the products with 128 queries of 128 elements cost 170 more instructions per tile this way, and 310 if threads
    computed them.

    :param pointers: to the even elements; ``mask`` likewise
    :returns: the even and odd elements, scaled to leave float16 some range, ``[elements / 2, 8]``
    """
    column = tl.arange(0, 8)[None, :]
    even = tl.load(pointers, mask=mask, other=0.0)[:, None] * OFFSET_UNIT
    odd = tl.load(pointers + 1, mask=mask, other=0.0)[:, None] * OFFSET_UNIT
    even_rest = even - even.to(dtype).to(tl.float32)
    odd_rest = odd - odd.to(dtype).to(tl.float32)
    even = tl.where(column == 0, even, tl.where(column == 1, even_rest, 0.0))
    odd = tl.where(column == 0, odd, tl.where(column == 1, odd_rest, 0.0))
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _decoded(stored: tl.tensor, dtype: tl.constexpr, decoder: tl.constexpr) -> tl.tuple:
    """Return a tile of keys or values in the dtype of queries, or its even and odd elements."""
    if decoder is None:
        return (stored.to(dtype),)
    else:  # noqa: RET505 - without else, Triton would compile this after the return too
        return split_codes(stored, decoder)


@triton.jit
def _products(products: tl.tensor, rows: tl.tuple, first: tl.constexpr, keys: tl.tuple) -> tl.tensor:
    """Multiply the rows from tile ``first`` on with keys ``[block_n, elements]``, and add the products to others.

    :param products: ``[block_m, block_n]`` float32; None: there are none
    """
    for i in tl.static_range(len(keys)):
        products = tl.dot(rows[first + i], tl.trans(keys[i]), products, input_precision="ieee")
    return products


@triton.jit
def _weighted(sums: tl.tuple, weights: tl.tensor, values: tl.tuple, decay: tl.tensor) -> tl.tuple:
    """Add weighted values to sums that decay."""
    result: tl.tuple = ()
    for i in tl.static_range(len(values)):
        result += (tl.dot(weights, values[i], sums[i] * decay[:, None], input_precision="ieee"),)
    return result


@triton.jit
def attend(
    running: RunningSoftmax,
    queries: Queries,
    pages: HeadPages,
    scoring: Scoring,
    begin: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    block_n: tl.constexpr,
    masked: tl.constexpr,
) -> RunningSoftmax:
    """Fold the keys ``begin .. end - 1`` into the running softmax of a tile of queries, ``block_n`` keys at a time.

    :param begin: a multiple of ``block_n``
    :param first_key: no key, scale or table entry before it or from ``end`` on is read: there may be NaN or no block
    :param masked: False: every query sees every key of ``begin .. end - 1``, a whole number of tiles
    """
    sums, peak, total = running
    rows, factor, query_position, slope = queries
    decoder: tl.constexpr = pages.decoder
    key_only: tl.constexpr = pages.key_only
    block_size: tl.constexpr = pages.block_size
    quantized: tl.constexpr = decoder is not None
    parts: tl.constexpr = 2 if quantized else 1
    stored_dim: tl.constexpr = (pages.head_dim - key_only) // parts
    dim = tl.arange(0, rows[0].shape[1])
    key_only_dim = tl.arange(0, rows[len(rows) - 1].shape[1])
    position = begin + tl.arange(0, block_n)
    # Blocks are looked up per key, since a tile may straddle blocks, and one tile ahead: with the lookup and the loads
    # that depend on it in one iteration, Triton 3.6 keeps a single buffer of keys and waits for it. This way it keeps
    # num_stages of them in flight.
    present = position < end if scoring.window is None else (position >= first_key) & (position < end)
    block = tl.load(pages.block_table + position.to(tl.uint32) // block_size, mask=present, other=0)
    for first in range(begin, end, block_n):
        present = tl.full((block_n,), True, tl.int1)
        if masked:
            present = position < end if scoring.window is None else (position >= first_key) & (position < end)
        mask = present[:, None]
        if rows[0].shape[1] != stored_dim:
            mask = mask & (dim < stored_dim)[None, :]
        slot = position.to(tl.uint32) % block_size  # one instruction; four for a signed number
        wide = block.to(tl.uint32).to(tl.int64)  # a pool may have more than 2**31 elements
        vector = (wide * pages.block_stride + slot * pages.slot_stride)[:, None]
        element = vector + (key_only // parts) + dim[None, :]

        if quantized:  # loaded before the product, which hides the latency
            scale_element = wide * pages.scale_block_stride + slot * pages.scale_slot_stride
            if pages.value_cache is None:
                key_scales = tl.load(pages.k_scale + scale_element, mask=present, other=0.0)
                value_scales = key_scales
            else:
                of_keys = tl.arange(0, 2)[None, :] == 0
                scales = tl.where(
                    of_keys, pages.k_scale + scale_element[:, None], pages.v_scale + scale_element[:, None]
                )
                key_scales, value_scales = tl.split(tl.load(scales, mask=present[:, None], other=0.0))
            if decoder == INTEGER:
                key_scales *= 256.0
                value_scales *= 256.0

        keys = _decoded(tl.load(pages.key_cache + element, mask=mask, other=0), rows[0].dtype, decoder)
        scores = _products(None, rows, 0, keys)
        if key_only > 0:
            own = present[:, None] & (key_only_dim < key_only // parts)[None, :]
            stored = tl.load(pages.key_cache + (vector + key_only_dim[None, :]), mask=own, other=0)
            scores = _products(scores, rows, len(keys), _decoded(stored, rows[0].dtype, decoder))
        if quantized:
            # Scores are scaled instead of keys: codes are exact, and there are fewer scores than elements of keys.
            scores *= key_scales[None, :]
            if pages.key_offsets is not None:
                offset = pages.key_offsets + first // SPAN * pages.offset_stride + 2 * dim
                even, odd = offset_columns(offset, dim < stored_dim, rows[0].dtype)
                products = tl.dot(rows[0], even, input_precision="ieee")
                products = tl.dot(rows[1], odd, products, input_precision="ieee")
                scores += tl.sum(products, 1)[:, None] * (1.0 / OFFSET_UNIT)
        unit = factor * (scoring.scale * LOG2_E)
        if scoring.softcap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is correct at both infinities.
            exponential = tl.exp2(scores * (unit * (2.0 / scoring.softcap))[:, None])
            scores = (scoring.softcap * LOG2_E) * (1.0 - 2.0 / (exponential + 1.0))
            unit = tl.full(unit.shape, 1.0, tl.float32)
        if slope is not None:
            distance = position[None, :] - query_position[:, None]
            scores = scores * unit[:, None] + (slope * LOG2_E)[:, None] * distance.to(tl.float32)
            unit = tl.full(unit.shape, 1.0, tl.float32)
        if masked:
            visible = position[None, :] <= query_position[:, None]
            if scoring.window is not None:
                visible = visible & (position[None, :] > query_position[:, None] - scoring.window)
            scores = tl.where(visible, scores, float("-inf"))

        if quantized:
            # With this anchor, weights times value scales are at most about 1, and products too small for float16 are
            # negligible. Bounding the scales keeps weights within float32's range for any scales.
            bounded = tl.minimum(tl.maximum(value_scales, SMALLEST_SCALE), LARGEST_SCALE)
            # A float's bits as an integer approximate its base-2 logarithm within 0.09.
            logarithm = bounded.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0
            greatest = tl.max(scores * unit[:, None] + logarithm[None, :], 1)
        else:
            # The unit is positive, so it can be applied after the maximum: once per row here, and below as part of a
            # fused multiply-add.
            greatest = tl.max(scores, 1) * unit
        new_peak = tl.maximum(peak, greatest)
        anchor = new_peak
        if masked:
            anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # avoid -inf - -inf before the first key
        weights = tl.exp2(scores * unit[:, None] - anchor[:, None])
        decay = tl.exp2(peak - anchor)
        peak = new_peak
        total = total * decay[:, None] + weights if len(total.shape) == 2 else total * decay + tl.sum(weights, 1)

        values = keys
        if pages.value_cache is not None:
            values = _decoded(tl.load(pages.value_cache + element, mask=mask, other=0), rows[0].dtype, decoder)
        if quantized:
            weights = weights * value_scales[None, :]
        sums = _weighted(sums, weights.to(rows[0].dtype), values, decay)

        position += block_n
        block = tl.load(pages.block_table + position.to(tl.uint32) // block_size, mask=position < end, other=0)
    return RunningSoftmax(sums, peak, total)


@triton.jit
def joined(sums: tl.tuple) -> tl.tensor:
    """Return the sums with even and odd elements interleaved, ``[block_m, padded size of values]``."""
    return sums[0] if len(sums) == 1 else tl.interleave(sums[0], sums[1])


@triton.jit
def normalize(
    accumulator: tl.tensor, peak: tl.tensor, total: tl.tensor, sinks: tl.tensor, head: tl.tensor, valid: tl.tensor
) -> tl.tensor:
    """Divide finished rows ``[block_m, padded size of values]`` by their totals; rows whose query saw no key are zero.

    :param sinks: an extra logit per head in the denominator, or None
    :param head: ``[block_m]`` int32
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2_E
        # Bounded, since a sink far above every score would overflow; attention is nearly zero in that case anyway.
        total += tl.exp2(tl.minimum(sink - peak, 126.0))
    return accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
