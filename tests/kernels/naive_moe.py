"""Compute a mixture of experts as its formula says it, and make random ones to test with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation

__all__ = ["ACTIVATIONS", "MoeInputs", "naive_moe", "random_moe"]

ACTIVATIONS: Final[dict[KernelActivation, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}


class MoeInputs(NamedTuple):
    """Holds the arguments of ``fused_moe``, in order."""

    hidden: Tensor
    gate_up: Tensor
    down: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def random_moe(
    num_tokens: int,
    num_experts: int,
    num_selected: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    hidden_size: int = 24,
    intermediate_size: int = 20,
    is_gated: bool = True,
    seed: int = 0,
) -> MoeInputs:
    """Make inputs with values around 1 everywhere; each token's experts differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)

    weights_dtype = torch.promote_types(dtype, torch.float32)
    return MoeInputs(
        hidden=normal(num_tokens, hidden_size),
        gate_up=normal(num_experts, (1 + is_gated) * intermediate_size, hidden_size, scale=hidden_size**-0.5),
        down=normal(num_experts, hidden_size, intermediate_size, scale=intermediate_size**-0.5),
        topk_weights=torch.rand(num_tokens, num_selected, generator=generator).to(device, weights_dtype),
        topk_ids=torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :num_selected].to(device),
    )


def naive_moe(inputs: MoeInputs, activation: KernelActivation = "silu") -> Tensor:
    """Compute the mixture in float64, by token and expert."""
    activated = ACTIVATIONS[activation]
    out = torch.zeros_like(inputs.hidden, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(inputs.topk_ids.tolist(), inputs.topk_weights, strict=True)):
        x = inputs.hidden[token].double()
        for expert, weight in zip(experts, weights.double(), strict=True):
            first = inputs.gate_up[expert].double() @ x
            if len(first) == inputs.down.shape[2]:
                inner = activated(first)
            else:
                gate, up = first.chunk(2)
                inner = activated(gate) * up
            out[token] += weight * (inputs.down[expert].double() @ inner)
    return out
