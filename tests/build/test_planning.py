"""A plan leaves no file open."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import tiny
import tiny_vision
from paged_sdk import (
    ConfigError,
    IsqType,
    LayerTopology,
    TextModelBuilder,
    Topology,
    VisionModelBuilder,
    plan_memory,
)
from paged_sdk.build import planning
from paged_sdk.build.encoder_file import EncoderFile


class OpenEncoder:
    """Stands for the open file of an image encoder."""

    def __init__(self) -> None:
        self.is_open = True

    def names(self) -> list[str]:
        return []

    def close(self) -> None:
        self.is_open = False


def test_an_image_encoder_is_closed_where_no_plan_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = OpenEncoder()
    monkeypatch.setattr(EncoderFile, "open", lambda *_: encoder)
    monkeypatch.setattr(planning, "encoder_file", lambda *_: EncoderFile(tmp_path / "mmproj.gguf", True))
    builder = TextModelBuilder(tiny.make_checkpoint("llama", tmp_path / "model")).with_force_cpu()
    with pytest.raises(ConfigError, match="topology"):
        plan_memory(builder.with_topology(Topology.empty().with_range(range(99), LayerTopology(isq=IsqType.Q8_0))))
    assert not encoder.is_open


def test_an_image_encoder_stays_as_large_as_its_file_says(tmp_path: Path) -> None:
    """No ISQ type quantizes its matrices, and where a topology does, its convolution of 32 columns stays."""
    vision = tiny_vision.VISION_FAMILIES["llava"].config["vision_config"] | {"image_size": 64, "patch_size": 32}
    tiny_vision.make_vision_checkpoint("llava", tmp_path, vision_config=vision)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    encoder = [prod(shape) for name, shape in shapes.items() if "language_model" not in name and "lm_head" not in name]
    text, images = (make(tmp_path).with_dtype("float32") for make in (TextModelBuilder, VisionModelBuilder))
    alone = plan_memory(text.with_isq(IsqType.Q8_0)).weight_bytes
    assert plan_memory(images.with_isq(IsqType.Q8_0)).weight_bytes - alone == 4 * sum(encoder)
    assert plan_memory(images).weight_bytes - plan_memory(text).weight_bytes == 4 * sum(encoder)
    of_patches = Topology.empty().with_regex("patch_embedding", LayerTopology(isq=IsqType.Q8_0))
    assert plan_memory(images.with_topology(of_patches)).weight_bytes == plan_memory(images).weight_bytes
