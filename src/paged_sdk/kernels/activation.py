"""Computes the activation of an MLP, which may have a gate (Shazeer, 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, cast, get_args

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.fallback import device_of, runs_on_triton

__all__ = [
    "KernelActivation",
    "activation_reference",
    "check_activation",
    "gated_activation",
    "gated_activation_reference",
    "inner_activation_reference",
]

KernelActivation: TypeAlias = Literal["silu", "gelu_tanh", "relu2"]
"""The activations that kernels compute: SiLU, tanh-approximated GELU, and the square of ReLU."""

_NAMES: Final[tuple[str, ...]] = get_args(KernelActivation)


def check_activation(name: str) -> KernelActivation:
    """Return an activation by its name.

    :raises ConfigError: kernels have no activation of this name
    """
    if name not in _NAMES:
        raise ConfigError.of("activation", name, " or ".join(_NAMES))
    return cast("KernelActivation", name)


def gated_activation(gate_up: Tensor, activation: KernelActivation = "silu") -> Tensor:
    """Compute ``activation(gate) * up``.

    :param gate_up: ``[..., 2 * size]``, float32, float16 or bfloat16: gate, then up
    :returns: ``[..., size]``; the Triton kernel rounds once, the reference after each operation
    :raises ConfigError: the last dimension is odd
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ConfigError.of("gate_up.shape", tuple(gate_up.shape), "an even last dimension: gate and up")
    if runs_on_triton("gated_activation", gate_up):
        from paged_sdk.kernels.triton import activation as triton_kernels

        with device_of(gate_up):
            return triton_kernels.gated_activation(gate_up, activation)
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: Tensor, activation: KernelActivation = "silu") -> Tensor:
    """Implement :func:`gated_activation` with torch operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation_reference(gate, activation).mul_(up)


def activation_reference(x: Tensor, activation: KernelActivation) -> Tensor:
    """Compute an activation with torch operations."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square_()


def inner_activation_reference(x: Tensor, activation: KernelActivation, *, is_gated: bool) -> Tensor:
    """Compute what the last projection of an MLP multiplies, with torch operations.

    :param x: the outputs of the projections before: gate and up of an MLP with a gate, otherwise up alone
    """
    return gated_activation_reference(x, activation) if is_gated else activation_reference(x, activation)
