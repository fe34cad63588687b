"""Sorts the tokens of a mixture of experts on the device into tiles for grouped products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sort_by_expert"]


def sort_by_expert(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Sort pairs of token and expert by expert, and divide them into tiles, without waiting for the device.

    :returns: ``pairs`` ``[num_pairs]`` int32, sorted by expert; and ``tiles`` ``[3, num_tiles]`` int32: each tile's
        expert, the index of its first pair in ``pairs``, and the end of its expert's pairs. ``num_tiles`` is an upper
        bound: unused tiles have expert ``num_experts`` or more
    """
    num_pairs = topk_ids.numel()
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m
    counts = torch.zeros(num_experts, dtype=torch.int32, device=topk_ids.device)
    ranks = torch.empty(num_pairs, dtype=torch.int32, device=topk_ids.device)
    pairs = torch.empty_like(ranks)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=topk_ids.device)
    _rank[(triton.cdiv(num_pairs, 256),)](topk_ids, counts, ranks, num_pairs, block=256)
    padded_experts = triton.next_power_of_2(num_experts)
    block = min(256, max(16, 8192 // padded_experts))  # items per program, each compared with all experts
    _place[(triton.cdiv(max(num_pairs, num_tiles), block),)](
        topk_ids,
        counts,
        ranks,
        pairs,
        tiles,
        num_pairs,
        num_tiles,
        num_experts=num_experts,
        padded_experts=padded_experts,
        block_m=block_m,
        block=block,
    )
    return pairs, tiles


@triton.jit(do_not_specialize=["num_pairs"])
def _rank(topk_ids: tl.tensor, counts: tl.tensor, ranks: tl.tensor, num_pairs: tl.tensor, block: tl.constexpr) -> None:
    """Count each expert's pairs, and rank pairs within their expert. Ranks vary from run to run, results do not."""
    pair = tl.program_id(0) * block + tl.arange(0, block)
    valid = pair < num_pairs
    expert = tl.load(topk_ids + pair, mask=valid, other=0)
    rank = tl.atomic_add(counts + expert, 1, mask=valid, sem="relaxed")
    tl.store(ranks + pair, rank, mask=valid)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place(
    topk_ids: tl.tensor,
    counts: tl.tensor,
    ranks: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.constexpr,
    padded_experts: tl.constexpr,
    block_m: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write pairs in sorted order, and describe tiles; each program handles ``block`` of both."""
    expert = tl.arange(0, padded_experts)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    end = tl.cumsum(count, 0)
    start = end - count
    item = tl.program_id(0) * block + tl.arange(0, block)

    own = tl.load(topk_ids + item, mask=item < num_pairs, other=0).to(tl.int32)
    first = tl.sum(tl.where(own[:, None] == expert[None, :], start[None, :], 0), axis=1)
    rank = tl.load(ranks + item, mask=item < num_pairs, other=0)
    tl.store(pairs + first + rank, item, mask=item < num_pairs)

    num_own_tiles = (count + block_m - 1) // block_m
    tile_end = tl.cumsum(num_own_tiles, 0)
    tile_expert = tl.sum((tile_end[None, :] <= item[:, None]).to(tl.int32), axis=1)
    is_own = tile_expert[:, None] == expert[None, :]
    tile_start = tl.sum(tl.where(is_own, (tile_end - num_own_tiles)[None, :], 0), axis=1)
    first_row = tl.sum(tl.where(is_own, start[None, :], 0), axis=1) + (item - tile_start) * block_m
    row_end = tl.sum(tl.where(is_own, end[None, :], 0), axis=1)
    tl.store(tiles + item, tile_expert, mask=item < num_tiles)
    tl.store(tiles + num_tiles + item, first_row, mask=item < num_tiles)
    tl.store(tiles + 2 * num_tiles + item, row_end, mask=item < num_tiles)
