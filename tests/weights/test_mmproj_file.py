"""The file of an image encoder: what it holds, or an error that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_files import write_gguf
from paged_sdk.errors import CheckpointError
from paged_sdk.weights.mmproj.file import MmprojFile


def write_parts(directory: Path, *names: str) -> list[Path]:
    """Write an image encoder in parts, each with one tensor."""
    paths = [directory / f"mmproj-{part:05}-of-{len(names):05}.gguf" for part in range(1, len(names) + 1)]
    for path, name in zip(paths, names, strict=True):
        metadata = {"clip.projector_type": "mlp", "split.count": len(names)}
        write_gguf(path, metadata, {name: np.zeros(32, np.float32)}, architecture="clip")
    return paths


def test_all_parts_are_one_encoder(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, "v.blk.0.ln1.weight", "v.blk.0.ln2.weight")
    for path in (first, second):
        file = MmprojFile(path)
        assert (file.projector, set(file.tensors)) == ("mlp", {"v.blk.0.ln1.weight", "v.blk.0.ln2.weight"})
        file.close()


def test_parts_must_not_repeat_tensors(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, "v.blk.0.ln1.weight", "v.blk.0.ln1.weight")
    with pytest.raises(CheckpointError, match=f"{second} repeats tensor 'v.blk.0.ln1.weight'"):
        MmprojFile(first)
