"""Plans how decode attention divides the keys of rows among programs, and what their partial results take."""

from __future__ import annotations

from typing import Final

import torch
import triton
from attrs import frozen

from paged_sdk.kernels.triton.attention_tile_choices import LARGE_HEAD, LARGEST_DECODE_TILE

__all__ = [
    "MOST_PARTIAL_BYTES",
    "SplitPlan",
    "bytes_of_result",
    "most_partial_bytes",
    "plan_splits",
    "programs_that_fill",
]

# Programs per multiprocessor: enough that the last ones to finish leave it idle only briefly.
_PROGRAMS_PER_MULTIPROCESSOR: Final = 8
# Of large heads, one or two at a time occupy a multiprocessor, and partial results weigh more: those of 64 rows of 512
# elements take as many bytes as 114 latent vectors.
_PROGRAMS_WITH_LARGE_HEADS: Final = 2
# A shorter split costs more to join than it gains; a longer one would delay a batch of mixed lengths.
_SHORTEST_SPLIT: Final = 128
_LONGEST_SPLIT: Final = 8192
MOST_PARTIAL_BYTES: Final = 2**28
"""Limit on the memory of partial results, which is lost to KV blocks.

It suffices for 16 splits (a context of 131,072 tokens) of 1,016 query tokens with 32 heads of 128 elements; with more
tokens, splits are fewer and longer.
"""


@frozen
class SplitPlan:
    """Describes how the keys of each row are divided: into ``parts`` equal splits, whose length is within the bounds.

    It holds host integers only, so that a CUDA graph can be captured: the device computes each row's splits from its
    length.

    :ivar num_splits: the most splits of a row
    :ivar parts: number of splits of a row if their length is within both bounds
    :ivar shortest: keys of the shortest split, a multiple of ``block_n``
    :ivar longest: keys of the longest split, a multiple of ``block_n``
    """

    num_splits: int
    parts: int
    shortest: int
    longest: int


def programs_that_fill(multiprocessors: int, value_dim: int) -> int:
    """Return the number of programs that keep a device busy to the end."""
    is_large = value_dim > LARGE_HEAD
    return multiprocessors * (_PROGRAMS_WITH_LARGE_HEADS if is_large else _PROGRAMS_PER_MULTIPROCESSOR)


def plan_splits(num_programs: int, num_keys: int, block_n: int, wanted: int, most: int) -> SplitPlan:
    """Plan splits that fill the device, and that divide a long row among several programs even beside many short rows.

    :param num_programs: programs without splits: query tiles of all rows and KV heads
    :param num_keys: the most keys that a row reads
    :param wanted: programs that fill the device: see :func:`programs_that_fill`
    :param most: the most splits per row that the memory limit allows, at least 1
    """
    shortest = max(_SHORTEST_SPLIT, block_n)
    longest = max(_LONGEST_SPLIT, triton.cdiv(triton.cdiv(num_keys, most), block_n) * block_n)
    parts = min(triton.cdiv(wanted, num_programs), most)
    num_splits = min(max(parts, triton.cdiv(num_keys, longest)), triton.cdiv(num_keys, shortest))
    return SplitPlan(num_splits=max(1, num_splits), parts=parts, shortest=shortest, longest=longest)


def most_partial_bytes(
    *, num_tokens: int, num_heads: int, value_dim: int, max_context_len: int, multiprocessors: int
) -> int:
    """Return the most bytes that partial results of a layer take, of any batch within these limits.

    :param num_tokens: the most query tokens of a batch
    :param value_dim: elements per head of values
    """
    # Splits that fill the device make less than twice as many programs, each with at most LARGEST_DECODE_TILE results.
    num_results = 2 * programs_that_fill(multiprocessors, value_dim) * LARGEST_DECODE_TILE
    if max_context_len > _LONGEST_SPLIT:
        num_results = max(num_results, num_tokens * num_heads * triton.cdiv(max_context_len, _LONGEST_SPLIT))
    return min(num_results * bytes_of_result(value_dim), MOST_PARTIAL_BYTES)


def bytes_of_result(value_dim: int) -> int:
    """Return the bytes of a split's result for one token and head: a vector, and the log-sum of its weights."""
    return (value_dim + 1) * torch.float32.itemsize
