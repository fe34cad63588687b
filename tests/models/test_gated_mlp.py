"""A layer's MLP by transformers' activations."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from paged_sdk.config.activation import LEARNED, Activation
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.quant.dense import DenseLinear


@pytest.mark.parametrize("activation", [each for each in Activation if each not in LEARNED])
def test_an_mlp_activates_as_the_name_says(activation: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(*shape, generator=generator) for shape in ((4, 6), (10, 6), (6, 5)))
    mlp = GatedMlp(gate_up=DenseLinear(gate_up), down=DenseLinear(down), activation=activation)
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    torch.testing.assert_close(mlp.forward(x, None), (ACT2FN[activation.value](gate) * up) @ down.T)
