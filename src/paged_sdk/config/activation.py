"""Name the non-linearities of MLPs."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["LEARNED", "Activation"]


class Activation(Enum):
    """Names the non-linearity of an MLP, by Hugging Face's names."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    QUICK_GELU = "quick_gelu"
    RELU = "relu"
    RELU2 = "relu2"
    RELU6 = "relu6"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    MISH = "mish"
    HARDSWISH = "hardswish"
    LINEAR = "linear"
    XIELU = "xielu"


LEARNED: Final = frozenset({Activation.XIELU})
"""The activations with learned numbers, which each layer has of its own."""
