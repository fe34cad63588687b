"""Opening whatever a path holds, damaged files included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tiny
from gguf_files import write_gguf
from paged_sdk.errors import CheckpointError, ModelLoadError, UnsupportedQuantizationError
from paged_sdk.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")


def test_directory(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("qwen3", tmp_path)
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.path, checkpoint.metadata) == (directory, None)
    assert checkpoint.config == json.loads((directory / "config.json").read_text())
    assert "model.norm.weight" in checkpoint.source


def test_gguf_file(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.metadata is not None
    assert checkpoint.metadata["tokenizer.ggml.model"] == "gpt2"
    assert "model.norm.weight" in checkpoint.source


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json cannot be opened: No such file"),
        ("{", r"config\.json is not JSON"),
        ("[" * 5000, r"config\.json is not JSON"),
        ("[1]", r"config\.json must hold a JSON object, not list"),
    ],
)
def test_config_that_is_none(tmp_path: Path, content: str | None, message: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_quantized_safetensors_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(UnsupportedQuantizationError, match="quantized by 'aqlm'") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.quantization == "aqlm"


def test_files_of_other_kinds(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        open_checkpoint(tmp_path / "model.bin")
    torch.save({"a": torch.zeros(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is a pickle"):
        open_checkpoint(tmp_path / "old.pt")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="load the directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "ggml-model.bin").write_bytes(b"tjgg" + bytes(64))
    with pytest.raises(CheckpointError, match="ggjt file of version 0"):
        open_checkpoint(tmp_path / "ggml-model.bin")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(tmp_path / "nowhere")


def read_all(path: Path) -> None:
    source = open_checkpoint(path).source
    for name in source.names():
        source.tensor(name, torch.float32, CPU)
    source.close()


def damaged(content: bytes, flips: list[tuple[int, int]], size: int | None) -> bytes:
    """Return the content with bytes replaced, by position, and cut."""
    changed = bytearray(content)
    for position, value in flips:
        changed[position % len(changed)] = value
    return bytes(changed[:size])


# The first bytes hold what matters: lengths, types, names; the rest is numbers of any value.
flips = st.lists(st.tuples(st.integers(0, 1800), st.integers(0, 255)), max_size=4)
sizes = st.none() | st.integers(0, 40_000)


@given(flips=flips, size=sizes)
@settings(max_examples=400, deadline=None)
def test_damaged_gguf_loads_or_says_why(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], size: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = write_gguf(path, quantization="Q8_0").read_bytes()
    path.write_bytes(damaged(content, flips, size))
    try:
        read_all(path)
    except ModelLoadError as error:
        assert "damaged.gguf" in str(error)


@given(flips=flips, size=sizes)
@settings(max_examples=400, deadline=None)
def test_damaged_safetensors_load_or_say_why(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], size: int | None
) -> None:
    directory = tmp_path_factory.getbasetemp() / "damaged"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    path = directory / "model.safetensors"
    save_file({f"layer.{index}": torch.zeros(index, 3, dtype=torch.bfloat16) for index in range(8)}, path)
    path.write_bytes(damaged(path.read_bytes(), flips, size))
    try:
        read_all(directory)
    except ModelLoadError as error:
        assert "damaged" in str(error)
