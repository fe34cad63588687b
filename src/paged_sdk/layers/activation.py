"""Map each activation to the function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.layers.xielu import Xielu

__all__ = ["KERNEL_ACTIVATIONS", "activation_function"]

KERNEL_ACTIVATIONS: Final[Mapping[Activation, KernelActivation]] = MappingProxyType(
    {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh", Activation.RELU2: "relu2"}
)
"""The activations that kernels compute as a part of MLPs and experts, by the name that kernels have for them."""

_FUNCTIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        Activation.SILU: F.silu,
        Activation.GELU: F.gelu,
        Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
        Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
        Activation.RELU: F.relu,
        Activation.RELU2: lambda x: F.relu(x).square(),
        Activation.RELU6: F.relu6,
        Activation.LEAKY_RELU: F.leaky_relu,
        Activation.SIGMOID: torch.sigmoid,
        Activation.TANH: torch.tanh,
        Activation.MISH: F.mish,
        Activation.HARDSWISH: F.hardswish,
        Activation.LINEAR: lambda x: x,
    }
)


def activation_function(activation: Activation | Xielu) -> Callable[[Tensor], Tensor]:
    """Return the function that computes an activation, element by element."""
    return activation if isinstance(activation, Xielu) else _FUNCTIONS[activation]
