"""Selects experts: one warp per token computes softmax, top-k and renormalization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["route"]

# Replaces NaN and -inf: such experts are selected after those with finite logits, but before the padding.
_LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)


def route(logits: Tensor, num_selected: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See :func:`paged_sdk.kernels.fused_moe.route`; of equal logits, the lowest expert is selected."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_selected, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_selected, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            weights,
            ids,
            *logits.stride(),
            num_experts=num_experts,
            num_selected=num_selected,
            renormalize=renormalize,
            block=triton.next_power_of_2(num_experts),
            block_selected=triton.next_power_of_2(num_selected),
            num_warps=1,
        )
    return weights, ids


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    stride: tl.tensor,
    column_stride: tl.tensor,
    num_experts: tl.constexpr,
    num_selected: tl.constexpr,
    renormalize: tl.constexpr,
    block: tl.constexpr,
    block_selected: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    exists = expert < num_experts
    logits = tl.load(logits_ptr + token * stride + expert * column_stride, mask=exists, other=float("-inf"))
    logits = logits.to(tl.float32)
    largest = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - largest), 0)
    # For any logits, only existing experts are selected, each at most once: other kernels read their weights.
    left = tl.where(exists & ~(logits > _LOWEST), _LOWEST, logits)
    slot = tl.arange(0, block_selected)
    chosen = tl.full([block_selected], float("-inf"), tl.float32)
    ids = tl.zeros([block_selected], tl.int64)
    for i in range(num_selected):
        value, place = tl.max(left, 0, return_indices=True)
        chosen = tl.where(slot == i, value, chosen)
        ids = tl.where(slot == i, place, ids)
        left = tl.where(expert == place, float("-inf"), left)
    weights = tl.exp(chosen - largest) / total
    if renormalize:
        weights /= tl.sum(weights, 0)
    place_of = token * num_selected + slot
    tl.store(weights_ptr + place_of, weights, mask=slot < num_selected)
    tl.store(ids_ptr + place_of, ids, mask=slot < num_selected)
