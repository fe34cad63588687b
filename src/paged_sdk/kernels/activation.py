"""Computes the gated activation of an MLP (Shazeer, 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.fallback import device_of, runs_on_triton

__all__ = ["GatedActivation", "gated_activation", "gated_activation_reference"]

GatedActivation: TypeAlias = Literal["silu", "gelu_tanh"]


def gated_activation(gate_up: Tensor, activation: GatedActivation = "silu") -> Tensor:
    """Compute ``activation(gate) * up``.

    :param gate_up: ``[..., 2 * size]``, float32, float16 or bfloat16: gate, then up
    :param activation: ``"silu"``, or ``"gelu_tanh"``: tanh-approximated GELU
    :returns: ``[..., size]``; the Triton kernel rounds once, the reference after each operation
    :raises ConfigError: the last dimension is odd
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ConfigError.of("gate_up.shape", tuple(gate_up.shape), "an even last dimension: gate and up")
    if runs_on_triton("gated_activation", gate_up):
        from paged_sdk.kernels.triton import activation as triton_kernels

        with device_of(gate_up):
            return triton_kernels.gated_activation(gate_up, gelu=activation == "gelu_tanh")
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: Tensor, activation: GatedActivation = "silu") -> Tensor:
    """Implement :func:`gated_activation` with torch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
