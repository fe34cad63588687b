"""On which device the tensors of a checkpoint are."""

from __future__ import annotations

import re

import torch

from paged_sdk.build.placement import PlacedNames
from paged_sdk.kernels.placement import Placement
from paged_sdk.models.tensor_names import TensorNames


def test_layers_that_predict_further_tokens_are_on_no_device() -> None:
    """They follow the model's own in checkpoints, and are not loaded."""
    near, far = torch.device("cpu"), torch.device("meta")
    names = ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3))]
    placed = PlacedNames(Placement(embedding=near, layers=(near, far), head=far), names, TensorNames())
    assert placed.devices_of(re.compile("down_proj")) == (near, far)
    assert placed.devices_of(re.compile(r"layers\.2\.")) == ()
