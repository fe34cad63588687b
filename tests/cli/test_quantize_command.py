"""``paged-sdk quantize`` writes a GGUF file, and says in one line what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from paged_sdk.cli.app import app
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS
from paged_sdk.weights.gguf_file import GgufFile


def quantize(*args: object) -> tuple[int, str]:
    """Run the command; return its exit code, and what it says beside results."""
    result = CliRunner().invoke(app, ["quantize", *map(str, args)])
    return result.exit_code, " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("model"))


def test_a_model_is_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    code, said = quantize(source, target, "--type", "q8_0", "--override", "ffn_down=F16", "--override", r"blk\.1=Q4_0")
    assert (code, "m.gguf: " in said) == (0, True), said
    kinds = {name: BLOCK_FORMATS[tensor.type].name for name, tensor in GgufFile(target).tensors.items()}
    names = ("blk.0.ffn_down.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.1.attn_norm.weight")
    assert [kinds[name] for name in names] == ["F16", "Q8_0", "Q4_0", "F32"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--type", "Q4"), "'Q4' is not allowed"),
        (("--override", "ffn_down"), "expected REGEX=TYPE"),
        (("--override", "nothing=F16"), "--override"),
    ],
)
def test_what_cannot_be_is_said(flags: tuple[str, ...], expected: str, source: Path, tmp_path: Path) -> None:
    code, said = quantize(source, tmp_path / "m.gguf", *flags)
    assert code in (1, 2)
    assert expected in said
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists(source: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    code, said = quantize(source, tmp_path / "m.gguf")
    assert (code, "a path where nothing is yet" in said) == (1, True)
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_importance_is_collected_or_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    target = tmp_path / "m.gguf"
    code, said = quantize(source, target, "--type", "q4_0", "--calibrate", tmp_path / "text.txt")
    assert (code, "m.gguf: " in said) == (0, True), said
    metadata = GgufFile(target).metadata
    assert metadata["quantize.imatrix.file"] == "calibration on text.txt"
    code, said = quantize(source, tmp_path / "n.gguf", "--imatrix", target)
    assert (code, "is no importance matrix that can be read: it is a GGUF 'model'" in said) == (1, True), said
    code, said = quantize(source, tmp_path / "n.gguf", "--imatrix", target, "--calibrate", tmp_path / "text.txt")
    assert (code, "exclude each other" in said) == (2, True), said
    code, said = quantize(source, tmp_path / "n.gguf", "--calibrate", tmp_path / "none.txt")
    assert (code, "--calibrate" in said) == (2, True), said
