"""Time the mixture of experts of Qwen3-30B-A3B (128 experts, 8 per token) on CUDA, in bfloat16 and in Q4_K.

For comparison, the same run times torch's grouped matrix products with routing, as transformers uses them, and a device
copy, which is the limit for few tokens. Every call has other experts than the one before, so that weights are read from
memory and not from the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.ahead import compile_side_by_side
from benchmarks.gpu.quantized_linear import random_matrix
from benchmarks.gpu.timing import Row, copy_bandwidth, launched_microseconds, microseconds
from paged_sdk.kernels.fused_moe import fused_moe, route
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.triton.quantized_experts import quantized_experts

__all__ = ["run"]

NUM_EXPERTS: Final = 128
NUM_SELECTED: Final = 8
HIDDEN_SIZE: Final = 2048
INTERMEDIATE_SIZE: Final = 768
NUM_TOKENS: Final = (1, 8, 32, 256, 2048, 8192)
NUM_BATCHES: Final = 8

Moe = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the mixture from hidden states, and the weights and ids of their experts."""


class _Batch(NamedTuple):
    hidden: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def run(device: torch.device) -> Iterator[Row]:
    """Time each number of tokens.

    :param device: a CUDA device
    :returns: per number of tokens and form of the weights: microseconds by CUDA graph and by calls from Python,
        TFLOP/s, and GB/s of the selected experts' weights; under ``reference``, torch's microseconds in bfloat16, and
        a device copy in GB/s
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    gate_up = normal(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE).mul_(HIDDEN_SIZE**-0.5)
    down = normal(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE).mul_(INTERMEDIATE_SIZE**-0.5)
    in_blocks = [
        random_matrix(tensor_type_of("Q4_K"), NUM_EXPERTS * rows, cols, device)
        for rows, cols in (*((INTERMEDIATE_SIZE, HIDDEN_SIZE),) * 2, (HIDDEN_SIZE, INTERMEDIATE_SIZE))
    ]
    gate, up, quantized_down = in_blocks
    forms: dict[str, tuple[Moe, int]] = {
        "bfloat16": (lambda x, *choice: fused_moe(x, gate_up, down, *choice), gate_up.nbytes + down.nbytes),
        "Q4_K": (
            lambda x, weights, ids: quantized_experts(
                x, gate, up, quantized_down, weights, ids, num_experts=NUM_EXPERTS
            ),
            sum(matrix.num_bytes for matrix in in_blocks),
        ),
    }

    def batch_of(num_tokens: int) -> _Batch:
        chosen = route(normal(num_tokens, NUM_EXPERTS), NUM_SELECTED, renormalize=True)
        return _Batch(normal(num_tokens, HIDDEN_SIZE), *chosen)

    compile_side_by_side(partial(moe, *batch_of(count)) for count in NUM_TOKENS for moe, _ in forms.values())
    copied = copy_bandwidth(device)
    for num_tokens in NUM_TOKENS:
        batches = [batch_of(num_tokens) for _ in range(NUM_BATCHES)]
        grouped = microseconds(_calls(lambda x, *choice: _grouped_mm(x, gate_up, down, *choice), batches)) / NUM_BATCHES
        used = statistics.mean(int(batch.topk_ids.flatten().bincount().count_nonzero()) for batch in batches)
        operations = 2 * num_tokens * NUM_SELECTED * 3 * HIDDEN_SIZE * INTERMEDIATE_SIZE
        for form, (moe, num_bytes) in forms.items():
            own = _calls(moe, batches)
            us = microseconds(own) / NUM_BATCHES
            yield {
                "kernel": "fused_moe",
                "case": f"Qwen3-30B-A3B, {num_tokens} tokens, {form}",
                "us": us,
                "us_from_python": launched_microseconds(own) / NUM_BATCHES,
                "gbps": used / NUM_EXPERTS * num_bytes / us / 1000,
                "tflops": operations / us / 1e6,
                "reference": {"torch_grouped_mm_us": grouped, "copy_gbps": copied},
            }


def _grouped_mm(hidden: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Compute the same by torch's grouped products, without synchronizing with the device."""
    flat = topk_ids.flatten()
    order = flat.argsort()
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(hidden[order // NUM_SELECTED], gate_up.mT, offs=ends).chunk(2, dim=-1)
    mapped = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    weighted = torch.empty_like(mapped)
    weighted[order] = (mapped * topk_weights.flatten()[order, None]).to(mapped.dtype)
    return weighted.view(-1, NUM_SELECTED, HIDDEN_SIZE).sum(1)


def _calls(moe: Moe, batches: Sequence[_Batch]) -> Callable[[], None]:
    """Return one call for each batch."""

    def call() -> None:
        for batch in batches:
            moe(batch.hidden, batch.topk_weights, batch.topk_ids)

    return call
