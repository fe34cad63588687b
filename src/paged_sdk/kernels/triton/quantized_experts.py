"""Computes a mixture of experts with :mod:`paged_sdk.kernels.quantized.triton_blocks` matrices, concatenated by rows.

A pair is a token and one of its experts, as in :mod:`~paged_sdk.kernels.triton.fused_moe`. There are two methods:

- Few pairs rarely share an expert: each is a matrix-vector product
  (:mod:`~paged_sdk.kernels.triton.quantized_expert_pairs`).
- Many pairs are sorted by expert, and tiles of weights are decoded within matrix products
  (:mod:`~paged_sdk.kernels.triton.quantized_expert_tiles`).

Grids depend on shapes only: nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix
from paged_sdk.kernels.triton.quantized_expert_pairs import down_of_tokens, gate_up_of_pairs
from paged_sdk.kernels.triton.quantized_expert_tiles import experts_by_tiles
from paged_sdk.kernels.triton.tile_choices import EXPERT_TILE_CHOICES, matrix_units, tile_choice

__all__ = ["quantized_experts"]


def quantized_experts(
    x: Tensor,
    gate: TritonBlockMatrix | None,
    up: TritonBlockMatrix,
    down: TritonBlockMatrix,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    activation: KernelActivation = "silu",
) -> Tensor:
    """Compute the sum of ``weight * down @ (activation(gate @ x) * (up @ x))`` over each token's experts.

    :param x: ``[num_tokens, hidden]`` float32, float16 or bfloat16
    :param gate: ``[num_experts * inner, hidden]``; ``up`` likewise. None: experts compute ``down @ activation(up @ x)``
    :param down: ``[num_experts * hidden, inner]``
    :param topk_weights: ``[num_tokens, num_selected]`` float32
    :param topk_ids: likewise, int64 or int32
    :returns: like ``x``
    """
    num_tokens, num_selected = topk_ids.shape
    x, topk_weights, topk_ids = x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    if num_tokens == 0:
        return x
    # With so few pairs, an expert rarely has two.
    if num_tokens == 1 or num_tokens * num_selected <= num_experts // 2:
        activated = gate_up_of_pairs(
            x, gate, up, topk_weights, topk_ids, num_experts=num_experts, activation=activation
        )
        return down_of_tokens(activated, down, topk_ids, num_experts=num_experts)
    pairs_of_expert = num_tokens * num_selected / num_experts
    # Tiles hold 1.5 times an expert's average number of rows, since a second tile would decode weights again.
    choice = tile_choice(EXPERT_TILE_CHOICES[matrix_units(x.device, x.dtype)], int(pairs_of_expert * 1.5))
    return experts_by_tiles(
        x, gate, up, down, topk_weights, topk_ids, choice, num_experts=num_experts, activation=activation
    )
