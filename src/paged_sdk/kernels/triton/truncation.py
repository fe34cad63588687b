"""What top-k, top-p and min-p leave of a row of logits, found by one program without sorting.

A search tries several thresholds in each pass over the row: how many logits, or how much weight, does not lie below
each. The last one with enough and the one after it bound the next pass, and so do the logits nearest to them: what is
found in the end is exactly a logit. Groups of logits whose largest lies below the bound are not read again, and a good
bound to begin with follows from the groups' largest logits and weights alone.

Bounds are int32 keys in the order of the floats, and each pass brings them nearer to each other, whatever the logits
are. Thresholds between them are spread evenly over floats, not keys: most keys belong to numbers next to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["kept_masses", "threshold_by_count", "threshold_by_weight"]

_LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095040)  # of the least finite float32
_NUM_PIVOTS: tl.constexpr = tl.constexpr(8)
_GROUPS_AT_ONCE: tl.constexpr = tl.constexpr(8)


@triton.jit
def threshold_by_count(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    maxima: tl.tensor,
    exists: tl.tensor,
    largest: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that ``count`` logits do not lie below it; the least finite one where there is none.

    :param row_ptr: logits of a row, the largest of which is finite
    :param live_ptr: int32 scratch of the row, an element for each group
    :param maxima: largest logit of each group, as many as a power of two
    :param exists: which of them are groups
    """
    # When the largest logits of ``count`` groups do not lie below it, then ``count`` logits do not.
    keys = _key(maxima)
    bound, step = tl.full((), -(2**31), tl.int64), tl.full((), 2**31, tl.int64)
    for _ in range(32):
        trial = bound + step
        bound = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= count, trial, bound)
        step = step >> 1
    low = tl.maximum(bound, _LOWEST_KEY).to(tl.int32)
    target = count.to(tl.float32)
    return _search(row_ptr, live_ptr, maxima, exists, low, largest, 0.0, target, vocab_size, False, group)


@triton.jit
def threshold_by_weight(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    maxima: tl.tensor,
    exists: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    total: tl.tensor,
    share: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that those not below it have at least a ``share`` of the weight ``total``.

    Other parameters are those of :func:`threshold_by_count`.

    :param least: logit that the result does not lie below
    :param rate: a logit's weight is ``exp2((logit - largest) * rate)``
    """
    # Logits whose weight is below an even part of what may be missing cannot make up that much. Half is for rounding.
    even_part = (1.0 - share) * total / (2.0 * vocab_size)
    low = tl.maximum(_key(tl.maximum(least, largest + tl.log2(even_part) / rate)), _LOWEST_KEY)
    return _search(row_ptr, live_ptr, maxima, exists, low, largest, rate, share * total, vocab_size, True, group)


@triton.jit
def kept_masses(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    maxima: tl.tensor,
    exists: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    threshold: tl.tensor,
    min_p: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """The weight of each group's logits that do not lie below ``threshold`` and weigh at least ``min_p``.

    Other parameters are those of :func:`threshold_by_weight`.

    :param masses_ptr: float32 scratch of the row, an element for each group
    """
    live = exists & is_kept(maxima, largest, rate, threshold, min_p)
    num_live = _list_groups(live_ptr, live)
    for first in range(0, num_live, _GROUPS_AT_ONCE):
        place = first + tl.arange(0, _GROUPS_AT_ONCE)
        groups = tl.load(live_ptr + place, mask=place < num_live, other=0)
        logits = _load_groups(row_ptr, groups, place < num_live, vocab_size, group)
        weights = tl.exp2((logits - largest) * rate)
        kept = is_kept(logits, largest, rate, threshold, min_p)
        tl.store(masses_ptr + groups, tl.sum(tl.where(kept, weights, 0.0), 1), mask=place < num_live)
    tl.debug_barrier()  # what other threads have stored is loaded
    return tl.load(masses_ptr + tl.arange(0, maxima.shape[0]), mask=live, other=0.0)


@triton.jit
def is_kept(
    logits: tl.tensor, largest: tl.tensor, rate: tl.tensor, threshold: tl.tensor, min_p: tl.tensor
) -> tl.tensor:
    """Whether logits, or the largest of groups, are among those to draw from."""
    return (logits >= threshold) & (tl.exp2((logits - largest) * rate) >= min_p)


@triton.jit
def _search(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    maxima: tl.tensor,
    exists: tl.tensor,
    low: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    target: tl.tensor,
    vocab_size: tl.tensor,
    by_weight: tl.constexpr,
    group: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that those not below it amount to ``target``: in weight, or one each.

    :param low: key that the result's does not lie below
    """
    num_logits: tl.constexpr = _GROUPS_AT_ONCE * group
    step = tl.arange(0, _NUM_PIVOTS)
    part = step.to(tl.float32) / (_NUM_PIVOTS - 1)
    high = _key(largest)
    while low < high:
        # The first is known to have enough; the last, if it has, ends the search.
        between = _key(_value(low) * (1 - part) + _value(high) * part)
        pivots = tl.where(step == 0, low, tl.minimum(tl.maximum(between, low + 1), high))
        pivots = tl.where(step == _NUM_PIVOTS - 1, high, pivots)
        num_live = _list_groups(live_ptr, exists & (_key(maxima) >= low))
        amounts = tl.zeros([_NUM_PIVOTS, num_logits], tl.float32)
        above = tl.full([num_logits], 2**31 - 1, tl.int32)
        below = tl.full([num_logits], -(2**31), tl.int32)
        for first in range(0, num_live, _GROUPS_AT_ONCE):
            place = first + tl.arange(0, _GROUPS_AT_ONCE)
            groups = tl.load(live_ptr + place, mask=place < num_live, other=0)
            logits = _load_groups(row_ptr, groups, place < num_live, vocab_size, group)
            logits = tl.reshape(logits, [num_logits], can_reorder=True)
            keys = _key(logits)
            amount = tl.exp2((logits - largest) * rate) if by_weight else tl.full([num_logits], 1.0, tl.float32)
            amounts += tl.where(keys[None, :] >= pivots[:, None], amount[None, :], 0.0)
            above = tl.minimum(above, tl.where(keys >= low, keys, 2**31 - 1))
            below = tl.maximum(below, tl.where(keys <= high, keys, -(2**31)))
        enough = tl.sum((tl.sum(amounts, 1) >= target).to(tl.int32), 0)
        last = tl.maximum(enough, 1) - 1
        low = tl.maximum(tl.max(tl.where(step == last, pivots, -(2**31)), 0), tl.min(above, 0))
        high = tl.minimum(tl.min(tl.where(step == last + 1, pivots - 1, high), 0), tl.max(below, 0))
    return _value(low)


@triton.jit
def _list_groups(live_ptr: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Write the numbers of live groups, one after the other; how many there are."""
    tl.debug_barrier()  # other threads may still be at the list before
    order = tl.cumsum(live.to(tl.int32), 0)
    tl.store(live_ptr + order - 1, tl.arange(0, live.shape[0]), mask=live)
    tl.debug_barrier()
    return tl.max(order, 0)


@triton.jit
def _load_groups(
    row_ptr: tl.tensor, groups: tl.tensor, mask: tl.tensor, vocab_size: tl.tensor, group: tl.constexpr
) -> tl.tensor:
    """The logits of some groups, ``[groups, group]``, -inf where there are none."""
    token = groups[:, None] * group + tl.arange(0, group)[None, :]
    return tl.load(row_ptr + token, mask=mask[:, None] & (token < vocab_size), other=float("-inf"))


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """Integers in the order of floats, and the other way round by :func:`_value`."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(keys: tl.tensor) -> tl.tensor:
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)
