"""A plan leaves no file open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from paged_sdk import ConfigError, IsqType, LayerTopology, TextModelBuilder, Topology, plan_memory
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
