"""Safetensors files and directories against the safetensors package, and everything that can be wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.weights.safetensors.file import SafetensorsFile
from paged_sdk.weights.safetensors.source import SafetensorsSource

CPU = torch.device("cpu")
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (3, 5), generator=generator) + torch.arange(5)
    return {f"x.{dtype}": values.to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write(path: Path, header: object, data: bytes) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


class TestFile:
    def test_every_dtype(self, tmp_path: Path) -> None:
        expected = tensors()
        save_file(expected, tmp_path / "t.safetensors", metadata={"format": "pt"})
        file = SafetensorsFile(tmp_path / "t.safetensors")
        assert set(file.names()) == expected.keys()
        for name, tensor in expected.items():
            got = file.tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got.double(), tensor.double())

    def test_tensors_own_their_memory_and_outlive_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.safetensors"
        save_file({"a": torch.arange(1000.0)}, path)
        before = path.read_bytes()
        file = SafetensorsFile(path)
        first, again = file.tensor("a"), file.tensor("a")
        assert first.data_ptr() != again.data_ptr()
        file.close()
        file.close()
        first.mul_(2)
        assert path.read_bytes() == before
        path.write_bytes(bytes(8))
        assert torch.equal(again, torch.arange(1000.0))
        with pytest.raises(CheckpointError, match="is closed"):
            file.tensor("a")

    def test_unaligned_data(self, tmp_path: Path) -> None:
        values = torch.arange(4.0)
        data = b"\x07" + values.numpy().tobytes()
        header = {
            "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]},
        }
        for padding in range(4):
            path = write(tmp_path / f"{padding}.safetensors", {**header, "__metadata__": {"p": "-" * padding}}, data)
            assert torch.equal(SafetensorsFile(path).tensor("a"), values)

    def refused(self, path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            SafetensorsFile(path)
        assert caught.value.path == path
        assert str(path) in str(caught.value)

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        save_file({"a": torch.arange(10.0)}, tmp_path / "t.safetensors")
        whole = (tmp_path / "t.safetensors").read_bytes()
        path = tmp_path / "cut.safetensors"
        for size in range(8, len(whole)):
            path.write_bytes(whole[:size])
            self.refused(path, "cannot be read: (its header would have|its tensors end at)")
        path.write_bytes(whole[:7])
        self.refused(path, "cut off within its header")
        path.write_bytes(b"")
        self.refused(path, "is empty")

    @pytest.mark.parametrize("size", [0, 1, 100_000_001, 2**63, 2**64 - 1])
    def test_absurd_header_length(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "t.safetensors"
        path.write_bytes(struct.pack("<Q", size) + bytes(100))
        self.refused(path, "its header would have|invalid JSON in header")

    def test_missing_file(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "t.safetensors", "cannot be opened: No such file")

    @pytest.mark.parametrize("text", [b"{ ", b"not json", b"\xff\xfe", b"[" * 5000])
    def test_header_that_is_no_json(self, tmp_path: Path, text: bytes) -> None:
        path = tmp_path / "t.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        self.refused(path, "invalid JSON in header")

    def test_header_that_is_no_object(self, tmp_path: Path) -> None:
        self.refused(write(tmp_path / "t.safetensors", [1], b""), "invalid JSON in header")

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            [],
            {},
            {"dtype": "F32", "shape": [1]},
            {"dtype": 4, "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
            {"dtype": "F32", "shape": [1], "data_offsets": [0]},
            {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        ],
    )
    def test_entries_that_describe_nothing(self, tmp_path: Path, entry: object) -> None:
        self.refused(
            write(tmp_path / "t.safetensors", {"a": entry}, bytes(8)),
            "does not describe tensor 'a'|'a' the shape|'a' of 0 bytes|tensors end at",
        )

    @pytest.mark.parametrize("offsets", [[-4, 0], [4, 0], [0, 5], [0, 3], [-8, -4]])
    def test_offsets_that_do_not_fit(self, tmp_path: Path, offsets: list[int]) -> None:
        header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
        self.refused(write(tmp_path / "t.safetensors", header, bytes(8)), "'a' of 4 bytes has the offsets|leaves a gap")

    def test_a_name_that_comes_twice(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.safetensors", {}, b"")
        entry = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
        text = f'{{"a": {entry}, "a": {entry}}}'.encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        self.refused(path, "the same name twice")

    def test_tensors_without_elements(self, tmp_path: Path) -> None:
        expected = {"a": torch.zeros(0, 3), "b": torch.ones(2), "c": torch.zeros(0)}
        save_file(expected, tmp_path / "t.safetensors")
        file = SafetensorsFile(tmp_path / "t.safetensors")
        assert {name: tuple(file.tensor(name).shape) for name in file.names()} == {"a": (0, 3), "b": (2,), "c": (0,)}

    def test_overlapping_tensors(self, tmp_path: Path) -> None:
        header = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
            for name, start in (("a", 0), ("b", 4))
        }
        self.refused(write(tmp_path / "t.safetensors", header, bytes(16)), "tensor 'b' overlaps 'a'")

    @pytest.mark.parametrize(("offsets", "size"), [([0, 4], 8), ([4, 8], 8)])
    def test_bytes_that_no_tensor_has(self, tmp_path: Path, offsets: list[int], size: int) -> None:
        header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
        self.refused(write(tmp_path / "t.safetensors", header, bytes(size)), "tensors end at|leaves a gap")

    @pytest.mark.parametrize("shape", [[0, 2**62], [2**40, 0]])
    def test_a_dimension_beyond_the_file(self, tmp_path: Path, shape: list[int]) -> None:
        header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        self.refused(write(tmp_path / "t.safetensors", header, b""), "tensor 'a' the shape")

    @pytest.mark.parametrize("shape", [[2**32, 2**32], [2**62, 2**62, 2**62]])
    def test_a_product_that_overflows(self, tmp_path: Path, shape: list[int]) -> None:
        header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        self.refused(write(tmp_path / "t.safetensors", header, b""), "cannot be read")

    def test_unknown_element_type(self, tmp_path: Path) -> None:
        header = {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
        with pytest.raises(UnsupportedQuantizationError, match="'a' has element type 'F4'") as caught:
            SafetensorsFile(write(tmp_path / "t.safetensors", header, bytes(1)))
        assert caught.value.quantization == "F4"
        assert "BF16" in caught.value.supported


class TestDirectory:
    @pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
    def test_values_are_the_models(self, tmp_path: Path, shard_size: str) -> None:
        model: Any = tiny.build_model("llama", dtype="bfloat16")
        model.save_pretrained(tmp_path, max_shard_size=shard_size)
        assert (tmp_path / "model.safetensors").exists() == (shard_size == "5GB")
        source = SafetensorsSource(tmp_path)
        expected = model.state_dict()
        assert set(source.names()) == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(source.tensor(name, torch.bfloat16, CPU), tensor)
            assert torch.equal(source.tensor(name, torch.float32, CPU), tensor.float())
        source.close()
        with pytest.raises(CheckpointError, match="is closed"):
            source.tensor("model.norm.weight", torch.float32, CPU)

    def test_missing_tensor(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        source = SafetensorsSource(tmp_path)
        assert "a" in source
        assert "b" not in source
        with pytest.raises(CheckpointError, match="holds no tensor 'b'"):
            source.tensor("b", torch.float32, CPU)

    def sharded(self, directory: Path, weight_map: object) -> Path:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"a": torch.zeros(1)}, directory / "one.safetensors")
        return directory

    def test_missing_shards_are_named(self, tmp_path: Path) -> None:
        weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
        with pytest.raises(CheckpointError, match=r"lacks 'three\.safetensors' and 1 more of 3 shards"):
            SafetensorsSource(self.sharded(tmp_path, weight_map))

    def test_tensor_missing_from_its_shard(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="places 'b' in shards that do not hold them"):
            SafetensorsSource(self.sharded(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}))

    @pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../one.safetensors"}, {"a": ""}])
    def test_index_that_is_none(self, tmp_path: Path, weight_map: object) -> None:
        with pytest.raises(CheckpointError, match="weight_map must give a file name"):
            SafetensorsSource(self.sharded(tmp_path, weight_map))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles_are_refused(self, tmp_path: Path, name: str) -> None:
        torch.save({"a": torch.zeros(1)}, tmp_path / name)
        with pytest.raises(CheckpointError, match=f"only {name}, a pickle, .*convert the model to safetensors"):
            SafetensorsSource(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"expected model\.safetensors, or"):
            SafetensorsSource(tmp_path)
        (tmp_path / "model.gguf").touch()
        with pytest.raises(CheckpointError, match=r"it has model\.gguf: give that file's path"):
            SafetensorsSource(tmp_path)
