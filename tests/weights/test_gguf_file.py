"""The GGUF reader against files of the gguf package, and against everything that can be wrong with a file."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_files import LLAMA, llama_tensors, write_gguf
from paged_sdk.errors import CheckpointError, ModelLoadError, UnsupportedQuantizationError
from paged_sdk.weights.gguf.file import GgufFile, open_gguf


def split_in_two(directory: Path) -> list[Path]:
    """Return a llama whose tensors lie in two files, as llama.cpp's splitter writes them."""
    tensors = llama_tensors()
    parts = [dict(list(tensors.items())[:4]), dict(list(tensors.items())[4:])]
    paths = []
    for index, part in enumerate(parts):
        path = directory / f"model-{index + 1:05}-of-00002.gguf"
        metadata = {"split.no": index, "split.count": 2, "split.tensors.count": len(tensors)}
        paths.append(write_gguf(path, {**metadata, **LLAMA} if index == 0 else metadata, part))
    return paths


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    expected = {
        "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000, "i32": -2_000_000_000,
        "u64": 2**63, "i64": -(2**62), "f32": 0.5, "f64": 1e300, "yes": True, "no": False, "text": "grün 漢字",
        "ints": [1, -2, 3], "floats": [0.5, -0.25], "flags": [True, False, True], "texts": ["", "a", "漢字"],
        "nested": [[1, 2], [3]],
    }  # fmt: skip
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "grün 漢字")
    for name in ("ints", "floats", "flags", "texts", "nested"):
        writer.add_array(name, expected[name])  # type: ignore[arg-type]  # the values are of many types
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata = GgufFile(tmp_path / "kinds.gguf").metadata
    assert metadata == {"general.architecture": "llama"} | expected
    assert {type(metadata[name]) for name in ("yes", "no")} == {bool}
    assert {type(flag) for flag in metadata["flags"]} == {bool}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_1"])
def test_tensors_equal_the_gguf_packages(tmp_path: Path, alignment: int | None, quantization: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", alignment=alignment, quantization=quantization)
    file = GgufFile(path)
    reader = gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for expected in reader.tensors:
        tensor = file.tensors[expected.name]
        assert tensor.shape == tuple(expected.shape[::-1])
        assert tensor.type == expected.tensor_type
        assert np.array_equal(tensor.blocks().flatten().numpy(), expected.data.view(np.uint8).flatten())
        values = gguf.quants.dequantize(expected.data, expected.tensor_type)
        assert np.array_equal(tensor.decoded().numpy(), values)


def test_version_2_is_the_same_format(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    newest = GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + path.read_bytes()[8:])
    older = GgufFile(path)
    assert older.metadata == newest.metadata
    assert list(older.tensors) == list(newest.tensors)


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    file = GgufFile(path)
    stored = file.tensors["output_norm.weight"]
    values = stored.decoded()
    file.close()
    file.close()
    assert np.array_equal(values.numpy(), llama_tensors()["output_norm.weight"])
    with pytest.raises(CheckpointError, match="is closed"):
        stored.decoded()


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    before = path.read_bytes()
    GgufFile(path).tensors["output_norm.weight"].decoded().zero_()
    assert path.read_bytes() == before


def test_a_large_vocabulary_takes_no_time(tmp_path: Path) -> None:
    tokens = [f"token number {index}" for index in range(151_936)]
    path = write_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.tokens": tokens}, {})
    start = time.thread_time()
    assert GgufFile(path).metadata["tokenizer.ggml.tokens"] == tokens
    assert time.thread_time() - start < 2  # 0.07 s on one core; the gguf package's reader needs seconds


class TestSplit:
    @pytest.mark.parametrize("given", [0, 1])
    def test_any_part_opens_all(self, tmp_path: Path, given: int) -> None:
        files = open_gguf(split_in_two(tmp_path)[given])
        assert [file.path.name for file in files] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
        assert {name for file in files for name in file.tensors} == llama_tensors().keys()
        assert files[0].metadata["llama.block_count"] == 1

    def test_a_single_file_is_itself(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model-00001-of-00001.gguf", {"split.count": 1, **LLAMA})
        assert [file.path for file in open_gguf(path)] == [path]

    def test_missing_part_is_named(self, tmp_path: Path) -> None:
        first, second = split_in_two(tmp_path)
        second.unlink()
        with pytest.raises(
            CheckpointError, match=r"one part of 2: put model-00002-of-00002\.gguf into the same directory"
        ):
            open_gguf(first)

    def test_no_part_stays_open_after_an_error(self, tmp_path: Path) -> None:
        first, second = split_in_two(tmp_path)
        second.write_bytes(second.read_bytes()[:100])
        for path in (first, second):
            with pytest.raises(CheckpointError) as caught:
                open_gguf(path)
            assert caught.value.path == second
            assert not {*map(os.path.realpath, Path("/proc/self/fd").iterdir())} & {str(first), str(second)}

    def test_renamed_part_is_refused(self, tmp_path: Path) -> None:
        renamed = split_in_two(tmp_path)[0].rename(tmp_path / "model.gguf")
        with pytest.raises(CheckpointError, match="one part of 2: keep their original names"):
            open_gguf(renamed)


class TestDamage:
    """Checks that each kind of damage has its own message, which names the file."""

    @staticmethod
    def refused(path: Path, content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            GgufFile(path)
        assert str(path) in str(caught.value)
        assert caught.value.path == path

    @pytest.mark.parametrize("magic", [b"lmgg", b"fmgg", b"algg", b"ggla", b"GGML"])
    def test_formats_of_before_gguf(self, tmp_path: Path, magic: bytes) -> None:
        self.refused(tmp_path / "old.bin", magic + bytes(100), "older than GGUF.*convert the model again")

    def test_other_files(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "page.gguf", b"<!doctype html>", "is not a GGUF file: .* b'<!do', .*download it again")
        self.refused(tmp_path / "short.gguf", b"GG", "is not a GGUF file")
        self.refused(tmp_path / "empty.gguf", b"", "is empty")

    def test_big_endian(self, tmp_path: Path) -> None:
        path = tmp_path / "big.gguf"
        writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.refused(path, path.read_bytes(), "big-endian")
        self.refused(path, b"FUGG" + bytes(20), "big-endian")

    @pytest.mark.parametrize("version", [0, 1, 4])
    def test_other_versions(self, tmp_path: Path, version: int) -> None:
        self.refused(tmp_path / "v.gguf", b"GGUF" + struct.pack("<IQQ", version, 0, 0), f"GGUF version {version}")

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "model.gguf", {"tokens": ["a", "bc"], "scores": [0.5, 1.5], **LLAMA}).read_bytes()
        for size in [*range(4, 2000, 7), len(whole) // 2, len(whole) - 1]:
            self.refused(tmp_path / "cut.gguf", whole[:size], "it is cut off")

    def test_absurd_counts_are_refused_without_allocating(self, tmp_path: Path) -> None:
        many = struct.pack("<Q", 2**60)
        for kind in (0, 5, 8, 9, 12):
            entry = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 9, kind) + many
            content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(64)
            self.refused(tmp_path / "many.gguf", content, "it is cut off")

    def test_arrays_nested_without_end(self, tmp_path: Path) -> None:
        nested = struct.pack("<IQ", 9, 1) * 10_000
        content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nested
        self.refused(tmp_path / "deep.gguf", content, "nests arrays")

    def test_unknown_metadata_type(self, tmp_path: Path) -> None:
        content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 13, 0)
        self.refused(tmp_path / "kind.gguf", content, "unknown type 13")

    def test_text_that_is_no_text(self, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "model.gguf", {"key": "some text"}, {}).read_bytes()
        self.refused(tmp_path / "text.gguf", whole.replace(b"some text", b"some \xff\xfe\xfd\xfc"), "not UTF-8")

    def test_keys_and_tensors_are_unique(self, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "model.gguf", {"key.a": 1, "key.b": 2}).read_bytes()
        self.refused(tmp_path / "keys.gguf", whole.replace(b"key.b", b"key.a"), "metadata key 'key.a' twice")
        names = write_gguf(
            tmp_path / "names.gguf", {}, {"aa": np.zeros(8, np.float32), "ab": np.zeros(8, np.float32)}
        ).read_bytes()
        self.refused(tmp_path / "names.gguf", names.replace(b"ab", b"aa"), "tensor 'aa' twice")

    def test_alignment_must_be_one(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf", {"general.alignment": 12}, {})
        self.refused(path, path.read_bytes(), "general.alignment is 12")

    def test_tensor_type_that_cannot_be_decoded(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        kind = gguf.GGMLQuantizationType.Q8_K  # what activations are quantized to, and no weights
        writer.add_tensor("token_embd.weight", np.zeros((2, 292), np.uint8), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedQuantizationError, match=r"token_embd\.weight.* type 15 ") as caught:
            GgufFile(path)
        assert caught.value.path == path

    def test_missing_file_and_directory(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nowhere.gguf", tmp_path):
            with pytest.raises(ModelLoadError, match="cannot be opened"):
                GgufFile(path)


def test_shapes_are_torchs(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": np.arange(24, dtype=np.float32).reshape(2, 3, 4)})
    assert torch.equal(GgufFile(path).tensors["t"].decoded(), torch.arange(24.0).reshape(2, 3, 4))
