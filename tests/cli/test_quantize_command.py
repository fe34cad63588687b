"""``paged-sdk quantize`` writes a GGUF file, and says in one line what cannot be."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from paged_sdk.cli.app import app
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS
from paged_sdk.weights.gguf.file import GgufFile


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


def test_safetensors_are_written(source: Path, tmp_path: Path) -> None:
    code, said = quantize(source, tmp_path / "decoded", "--safetensors")
    assert (code, "decoded: " in said) == (0, True), said
    assert (tmp_path / "decoded" / "model.safetensors").exists()
    code, said = quantize(source, tmp_path / "other", "--mmproj-type", "F32")
    assert (code, "no effect without --mmproj" in said) == (2, True), said
    code, said = quantize(source, tmp_path / "other", "--safetensors", "--override", "ffn_down=F16")
    assert code == 2
    assert "--override" in said


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
    assert (code, "for TARGET:" in said, "a path where nothing is yet" in said) == (2, True, True), said
    assert (tmp_path / "m.gguf").read_text() == "mine"
    code, said = quantize(source, tmp_path / "no" / "m.gguf")
    assert (code, "for TARGET:" in said, "a path in a directory that exists" in said) == (2, True, True), said


def test_importance_is_collected_or_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    target = tmp_path / "m.gguf"
    code, said = quantize(source, target, "--type", "q4_0", "--calibrate", tmp_path / "text.txt")
    assert (code, "m.gguf: " in said) == (0, True), said
    metadata = GgufFile(target).metadata
    assert metadata["quantize.imatrix.file"] == "calibration on text.txt"
    code, said = quantize(source, tmp_path / "n.gguf", "--imatrix", target)
    assert (code, "an importance matrix: its general.type must be 'imatrix', found 'model'" in said) == (1, True), said
    kept = tmp_path / "imatrix.gguf"
    code, said = quantize(source, tmp_path / "k.gguf", "--calibrate", tmp_path / "text.txt", "--imatrix-out", kept)
    assert (code, GgufFile(kept).metadata["general.type"]) == (0, "imatrix"), said
    code, said = quantize(source, tmp_path / "l.gguf", "--imatrix", kept, "--calibrate", tmp_path / "text.txt")
    assert code == 0, said
    code, said = quantize(source, tmp_path / "n.gguf", "--imatrix", kept, "--imatrix-out", tmp_path / "two.gguf")
    assert (code, "--imatrix-out" in said) == (2, True), said
    code, said = quantize(source, tmp_path / "n.gguf", "--calibrate", tmp_path / "text.txt", "--imatrix-out", kept)
    assert (code, "--imatrix-out" in said) == (2, True), said
    code, said = quantize(source, tmp_path / "n.gguf", "--calibrate", tmp_path / "none.txt")
    assert (code, "--calibrate" in said) == (2, True), said


def test_layers_have_types_of_their_own(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text('0-1:\n  isq: Q8_0\n"/mlp.down_proj/":\n  isq: Q5_1\n/embed_tokens/:\n  isq: Q4_1\n')
    target = tmp_path / "m.gguf"
    code, said = quantize(source, target, "--type", "q4_0", "--topology", file, "--override", "attn_k=F16")
    assert code == 0, said
    kinds = {name: BLOCK_FORMATS[each.type].name for name, each in GgufFile(target).tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.1.attn_q.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.1.ffn_down.weight"] == "Q5_1"
    assert kinds["blk.0.attn_k.weight"] == "F16"
    assert kinds["token_embd.weight"] == "Q4_1"
    again = tmp_path / "again.gguf"  # which knows the same names
    assert quantize(target, again, "--type", "q4_0", "--topology", file, "--override", "attn_k=F16")[0] == 0
    assert kinds == {name: BLOCK_FORMATS[each.type].name for name, each in GgufFile(again).tensors.items()}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("0-99:\n  isq: Q8_0\n", "layers below"),
        ("/no_such/:\n  isq: Q8_0\n", "found in the name of a tensor"),
        ("0-1:\n  isq: AFQ4\n", "GGUF's blocks"),
        ("0-1:\n  device: cpu\n", "no devices in a file"),
        ("0-0:\n  isq: Q8_0\n", "a range of at least one layer"),
    ],
)
def test_topologies_that_a_file_cannot_have(content: str, said: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(content)
    code, answer = quantize(source, tmp_path / "m.gguf", "--topology", tmp_path / "layers.yaml")
    assert (code, said in answer) == (2, True), answer
    assert [path.name for path in tmp_path.iterdir()] == ["layers.yaml"]


def test_a_disk_that_fills_up_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def limited() -> None:  # as if the disk were full after 64 KiB
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    start = [sys.executable, "-c", "from paged_sdk.cli import main; main()"]
    command = [*start, "quantize", str(source), str(tmp_path / "m.gguf"), "--type", "F16"]
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, check=False)
    assert (done.returncode, "m.gguf cannot be written" in done.stderr) == (1, True), done.stderr
    assert list(tmp_path.iterdir()) == []


TOLD_TO_END = """
import gc, os, signal
import gguf, torch, paged_sdk.build.assembly, paged_sdk.build.export.gguf_encoding, paged_sdk.cli.app
from paged_sdk.cli import main

gc.freeze()  # otherwise each child goes through all that is imported once more as it ends: a second
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which tests may run, has it ignored
for sign in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    child = os.fork()  # which imports nothing more: that takes most of the time
    if not child:
        os.fsync = lambda file: signal.raise_signal(sign)
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_signal_to_end_leaves_nothing(source: Path, tmp_path: Path) -> None:
    flags = ["quantize", str(source), str(tmp_path / "m.gguf"), "--type", "F16"]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TOLD_TO_END, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["143", "143", "130"], "")
    assert list(tmp_path.iterdir()) == []


def test_sources_that_are_none(tmp_path: Path) -> None:
    for name, said in (("m.uqff", "uqff is"), ("m.pth", "is a pickle"), ("m.safetensors", "config.json")):
        path = tmp_path / name
        path.write_bytes(b"PK\x03\x04" + bytes(60))
        code, answer = quantize(path, tmp_path / "target.gguf")
        assert (code, said in answer.lower()) == (1, True), answer
        assert name in answer
    assert not (tmp_path / "target.gguf").exists()
