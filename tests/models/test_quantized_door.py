"""Quantized checkpoints of models that run through transformers' classes say what transformers says of their values."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.image_table import answers, answers_of_transformers
from benchmarks.support_table import PROMPTS, greedy, greedy_of_transformers
from benchmarks.tiny_classes import tiny_model
from benchmarks.tiny_image_classes import make_image_checkpoint
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from paged_sdk.kernels.placement import Placement
from paged_sdk.models.any_model import plan_model
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.quant.policy import DENSE
from paged_sdk.weights.checkpoint import open_checkpoint
from quantized_writers import WRITERS, pack_checkpoint

SHORT = ("gptq", "fp8")


def decoded(dense: Path, values: Mapping[str, Tensor]) -> Path:
    """Write what a packed checkpoint stands for."""
    target = dense.with_name("decoded")
    shutil.copytree(dense, target)
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, target / "model.safetensors")
    return target


# Solar Open has experts, whose matrices the class has in one tensor and its checkpoints apart.
@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *((name, "jais2") for name in SHORT),
        *(pytest.param(name, "jais2", marks=pytest.mark.long) for name in WRITERS if name not in SHORT),
        ("gptq", "solar_open"),
        pytest.param("compressed-tensors fp8", "solar_open", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_those_of_the_values(name: str, model_type: str, tmp_path: Path) -> None:
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    tiny_model(model_type).save_pretrained(dense)
    write, settings = WRITERS[name]
    values = pack_checkpoint(dense, packed, write, settings)
    checkpoint = open_checkpoint(packed)
    assert checkpoint.is_quantized
    plan = plan_model(checkpoint.config, torch.float32)
    loading: dict[str, Any] = {"policy": DENSE, "on_progress": None, "num_threads": 1}
    placement = Placement.on(torch.device("cpu"), plan.config.num_layers)
    model = plan.load(checkpoint.source, dtype=torch.float32, placement=placement, **loading)
    checkpoint.source.close()
    assert isinstance(model, TransformersModel)
    loader: Any = AutoModelForCausalLM
    reference = loader.from_pretrained(decoded(dense, values), dtype=torch.float32).eval()
    assert greedy(model, PROMPTS) == [greedy_of_transformers(reference, prompt) for prompt in PROMPTS]


# Of a class with a decoder here, and of one without.
@pytest.mark.parametrize("model_type", ["lighton_ocr", pytest.param("aya_vision", marks=pytest.mark.long)])
def test_images(model_type: str, tmp_path: Path) -> None:
    """Packed matrices of an encoder are decoded."""
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    dense.mkdir()
    make_image_checkpoint(model_type, dense)
    write, settings = WRITERS["compressed-tensors int8"]
    values = pack_checkpoint(dense, packed, write, settings)
    loader: Any = AutoModelForImageTextToText
    reference = loader.from_pretrained(decoded(dense, values), dtype=torch.float32).eval()
    assert answers(packed) == answers_of_transformers(reference, packed)
