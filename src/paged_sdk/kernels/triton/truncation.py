"""Finds the thresholds of top-k and min-p, and the weights of the tokens kept, in one program per row without sorting.

Logits are in groups, whose largest logits are known: a group is read only if its largest logit reaches the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["just_above", "kept_masses", "min_p_threshold", "top_k_threshold"]

_LOWEST_KEY: tl.constexpr = tl.constexpr(-2139095040)  # key of the lowest finite float32
_SMALLEST: tl.constexpr = tl.constexpr(-(2**31))
_LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)

# With more pivots or groups at once, registers would not suffice for two programs of 8 warps per multiprocessor.
_NUM_PIVOTS: tl.constexpr = tl.constexpr(8)
_GROUPS_TO_COUNT: tl.constexpr = tl.constexpr(8)
_GROUPS_TO_WEIGH: tl.constexpr = tl.constexpr(32)


@triton.jit
def top_k_threshold(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    maxima: tl.tensor,
    exists: tl.tensor,
    top_k: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """Return the ``top_k``-th largest logit, or the lowest finite float if there are fewer finite logits.

    Each pass over the row counts how many logits reach each of several pivots. The last pivot reached by enough logits
    and the one after it bound the next pass, tightened to the nearest logits, so that the search ends at a logit.

    Bounds and pivots are integers in the order of the floats (see :func:`_key`), so that they converge for any logits.
    Pivots are evenly spaced as floats, however, since most of the integers represent numbers close to zero.

    :param row_ptr: logits of a row, the largest of which is finite
    :param live_ptr: int32 scratch of the row, one element per group
    :param maxima: largest logit of each group, padded to a power of two
    :param exists: which elements of ``maxima`` are groups
    """
    num_logits: tl.constexpr = _GROUPS_TO_COUNT * group
    step = tl.arange(0, _NUM_PIVOTS)
    part = step.to(tl.float32) / (_NUM_PIVOTS - 1)
    largest_keys = _key(maxima)
    low, high = _kth_largest(largest_keys, top_k), tl.max(largest_keys, 0)
    while low < high:
        # Enough logits are known to reach the first pivot; if enough reach the last, it is the result.
        between = _key(_value(low) * (1 - part) + _value(high) * part)
        pivots = tl.where(step == 0, low, tl.minimum(tl.maximum(between, low + 1), high))
        pivots = tl.where(step == _NUM_PIVOTS - 1, high, pivots)
        num_live = _list_groups(live_ptr, exists & (largest_keys >= low))
        counts = tl.zeros([_NUM_PIVOTS, num_logits], tl.int32)
        above = tl.full([num_logits], _LARGEST, tl.int32)
        below = tl.full([num_logits], _SMALLEST, tl.int32)
        for first in range(0, num_live, _GROUPS_TO_COUNT):
            place = first + tl.arange(0, _GROUPS_TO_COUNT)
            _, logits = _load_groups(row_ptr, live_ptr, place, place < num_live, vocab_size, group)
            keys = _key(tl.reshape(logits, [num_logits]))
            counts += (keys[None, :] >= pivots[:, None]).to(tl.int32)
            above = tl.minimum(above, tl.where(keys >= low, keys, _LARGEST))
            below = tl.maximum(below, tl.where(keys <= high, keys, _SMALLEST))
        last = tl.sum((tl.sum(counts, 1) >= top_k).to(tl.int32), 0) - 1
        last = tl.maximum(last, 0)
        low = tl.maximum(tl.max(tl.where(step == last, pivots, _SMALLEST), 0), tl.min(above, 0))
        high = tl.minimum(tl.min(tl.where(step == last + 1, pivots - 1, high), 0), tl.max(below, 0))
    return _value(low)


@triton.jit
def min_p_threshold(largest: tl.tensor, rate: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Return the logit whose weight is ``min_p``; see :func:`kept_masses` for weights.

    :param min_p: above 0
    """
    return largest + tl.log2(min_p) / rate


@triton.jit
def just_above(logit: tl.tensor) -> tl.tensor:
    """Return the next larger float."""
    return _value(_key(tl.where(logit == 0, 0.0, logit)) + 1)  # the next key after -0 is 0, which is not larger


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
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """Sum the weights of each group's logits that are at least a threshold.

    ``row_ptr``, ``live_ptr``, ``maxima`` and ``exists`` are those of :func:`top_k_threshold`.

    :param masses_ptr: float32 scratch of the row, one element per group
    :param largest: largest logit of the row, finite
    :param rate: a logit's weight is ``exp2((logit - largest) * rate)``
    """
    live = exists & (maxima >= threshold)
    num_live = _list_groups(live_ptr, live)
    for first in range(0, num_live, _GROUPS_TO_WEIGH):
        place = first + tl.arange(0, _GROUPS_TO_WEIGH)
        groups, logits = _load_groups(row_ptr, live_ptr, place, place < num_live, vocab_size, group)
        weights = tl.where(logits >= threshold, tl.exp2((logits - largest) * rate), 0.0)
        tl.store(masses_ptr + groups, tl.sum(weights, 1), mask=place < num_live)
    tl.debug_barrier()  # the elements loaded next were stored by other threads
    return tl.load(masses_ptr + tl.arange(0, maxima.shape[0]), mask=live, other=0.0)


@triton.jit
def _kth_largest(keys: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Find the k-th largest key bit by bit; the result is at least the key of the lowest finite float."""
    found, step = tl.full((), -(2**31), tl.int64), tl.full((), 2**31, tl.int64)
    for _ in range(32):
        enough = tl.sum((keys >= found + step).to(tl.int32), 0) >= k
        found += tl.where(enough, step, 0)
        step = step >> 1
    return tl.maximum(found, _LOWEST_KEY).to(tl.int32)


@triton.jit
def _list_groups(live_ptr: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Write the numbers of live groups consecutively, and return how many there are."""
    tl.debug_barrier()  # other threads may still be reading the previous list
    order = tl.cumsum(live.to(tl.int32), 0)
    tl.store(live_ptr + order - 1, tl.arange(0, live.shape[0]), mask=live)
    tl.debug_barrier()
    return tl.max(order, 0)


@triton.jit
def _load_groups(
    row_ptr: tl.tensor,
    live_ptr: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    vocab_size: tl.tensor,
    group: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the numbers of live groups at ``place``, and their logits ``[groups, group]``, with -inf for padding."""
    groups = tl.load(live_ptr + place, mask=mask, other=0)
    token = groups[:, None] * group + tl.arange(0, group)[None, :]
    return groups, tl.load(row_ptr + token, mask=mask[:, None] & (token < vocab_size), other=float("-inf"))


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """Map floats to integers in the same order; :func:`_value` maps them back."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(keys: tl.tensor) -> tl.tensor:
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)
