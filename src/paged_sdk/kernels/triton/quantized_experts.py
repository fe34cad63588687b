"""Computes a mixture of experts on matrices of :mod:`paged_sdk.kernels.quantized.triton_blocks`, stacked row by row.

A pair is a token and one of its experts, as in :mod:`~paged_sdk.kernels.triton.fused_moe`, with the same two ways:

- Few pairs (:mod:`~paged_sdk.kernels.triton.quantized_expert_pairs`) hardly ever share an expert: threads add up.
- Many pairs (:mod:`~paged_sdk.kernels.triton.quantized_expert_tiles`) are sorted by expert, and weights are decoded
  within products of tiles.

The grid is made of shapes alone: nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.quantized_expert_pairs import down_of_tokens, gate_up_of_pairs
from paged_sdk.kernels.triton.quantized_expert_tiles import experts_by_tiles
from paged_sdk.kernels.triton.tile_choices import EXPERT_TILE_CHOICES, matrix_units, tile_choice

__all__ = ["quantized_experts"]


def quantized_experts(
    x: Tensor,
    gate: TritonBlockMatrix,
    up: TritonBlockMatrix,
    down: TritonBlockMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """Compute the sum of ``weight * down @ (silu(gate @ x) * (up @ x))`` over each token's experts.

    :param x: ``[num_tokens, hidden]`` float32, float16 or bfloat16
    :param gate: ``[num_experts * inner, hidden]``; ``up`` likewise
    :param down: ``[num_experts * hidden, inner]``
    :param topk_weights: ``[num_tokens, num_selected]`` float32
    :param topk_ids: likewise, int64 or int32
    :returns: like ``x``
    """
    num_tokens, num_selected = topk_ids.shape
    x, topk_weights, topk_ids = x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    if num_tokens == 0:
        return x
    # Up to so many pairs, an expert rarely has two.
    if num_tokens == 1 or num_tokens * num_selected <= num_experts // 2:
        activated = gate_up_of_pairs(x, gate, up, topk_weights, topk_ids, num_experts=num_experts)
        return down_of_tokens(activated, down, topk_ids, num_experts=num_experts)
    pairs_of_expert = num_tokens * num_selected / num_experts
    # Tiles hold 1.5 times as many rows as an expert has on average: a second one would decode weights again.
    choice = tile_choice(EXPERT_TILE_CHOICES[matrix_units(x.device, x.dtype)], int(pairs_of_expert * 1.5))
    return experts_by_tiles(x, gate, up, down, topk_weights, topk_ids, choice, num_experts=num_experts)
