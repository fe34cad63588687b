"""The gated activation of an MLP (Shazeer, 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import Activation
from paged_sdk.kernels import activation as activation_ops

__all__ = ["gated_activation"]


def gated_activation(activation: Activation, gate_up: Tensor) -> Tensor:
    """``activation(gate) * up``.

    :param gate_up: ``[..., 2 * intermediate_size]``: the gate, then the other factor
    :returns: ``[..., intermediate_size]``
    """
    if gate_up.is_cuda:
        return activation_ops.gated_activation(gate_up, "silu" if activation is Activation.SILU else "gelu_tanh")
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
