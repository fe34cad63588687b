"""Files of weights: what is no file is refused at once, and what happens to one while it is read is seen."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gguf_files import LLAMA, llama_tensors, write_gguf
from paged_sdk.errors import CheckpointError, ModelLoadError
from paged_sdk.system.files import MAX_TEXT_BYTES, read_json, read_json_if_there, read_text
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.gguf.file import GgufFile, open_gguf
from paged_sdk.weights.gguf.source import GgufSource
from paged_sdk.weights.hub import resolve_model
from paged_sdk.weights.safetensors.source import SafetensorsSource
from paged_sdk.weights.weight_file import WeightFile

CPU = torch.device("cpu")


class TestWhatIsNoFile:
    """A pipe would make a reader wait for ever, and a device never ends."""

    @pytest.mark.parametrize("read", [WeightFile, read_text, read_json, read_json_if_there, open_checkpoint, GgufFile])
    def test_pipes_and_devices(self, tmp_path: Path, read: Callable[[Path], object]) -> None:
        os.mkfifo(tmp_path / "model.gguf")
        for path in (tmp_path / "model.gguf", Path("/dev/zero")):
            with pytest.raises(CheckpointError, match="not a regular file") as caught:
                read(path)
            assert caught.value.path == path

    def test_pipes_within_a_directory(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="holds no safetensors weights"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        os.mkfifo(tmp_path / "config.json")
        with pytest.raises(CheckpointError, match=r"config\.json .*not a regular file"):
            open_checkpoint(tmp_path)

    def test_a_directory_with_a_files_name(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").mkdir()
        with pytest.raises(ModelLoadError, match="is not a model: it has neither"):
            open_checkpoint(resolve_model(tmp_path, gguf=True))
        with pytest.raises(CheckpointError, match="no safetensors weights"):
            open_checkpoint(tmp_path / "model.gguf")

    def test_links(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "blob")
        (tmp_path / "model.gguf").symlink_to("blob")
        (tmp_path / "dangling.gguf").symlink_to("nothing")
        (tmp_path / "loop.gguf").symlink_to("loop.gguf")
        assert open_checkpoint(tmp_path / "model.gguf").metadata is not None
        for name in ("dangling.gguf", "loop.gguf", "x" * 5000, "zero\0byte"):
            with pytest.raises(CheckpointError, match="cannot be opened"):
                open_checkpoint(tmp_path / name)


class TestWhatCannotBeRead:
    """Regular files, as they look: on a disk that fails, over a network that is gone, in /proc."""

    UNREADABLE = Path("/proc/self/mem")  # whose first page belongs to nobody: to read it is an error of the device
    is_there = pytest.mark.skipif(not UNREADABLE.exists(), reason="Linux's /proc")

    @is_there
    @pytest.mark.parametrize("read", [read_text, read_json, read_json_if_there, open_checkpoint])
    def test_an_error_of_the_device(self, read: Callable[[Path], object]) -> None:
        with pytest.raises(CheckpointError, match="/proc/self/mem cannot be read: Input/output error") as caught:
            read(self.UNREADABLE)
        assert caught.value.path == self.UNREADABLE

    @is_there
    def test_behind_a_link_in_a_directory(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").symlink_to(self.UNREADABLE)
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Input/output error"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors").symlink_to(self.UNREADABLE)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is empty"):  # as it says of itself
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.EMFILE, errno.ESTALE])
    @pytest.mark.parametrize("read", [WeightFile, read_text, read_json, open_checkpoint, GgufFile])
    def test_what_the_system_does_not_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], number: int
    ) -> None:
        def refuse(path: object, flags: int) -> int:
            raise OSError(number, os.strerror(number), path)

        path = write_gguf(tmp_path / "m.gguf")
        monkeypatch.setattr("paged_sdk.system.files.os.open", refuse)
        with pytest.raises(CheckpointError, match=f"cannot be opened: {os.strerror(number)}$") as caught:
            read(path)
        assert caught.value.path == path

    @pytest.mark.parametrize("name", ["x" * 5000, "zero\0byte", "\ud800", "line\nbreak", "no\udcffutf8"])
    def test_names_that_no_file_has_or_no_terminal_shows(self, tmp_path: Path, name: str) -> None:
        for read in (WeightFile, read_text, read_json, open_checkpoint):
            with pytest.raises(CheckpointError, match="cannot be opened") as caught:
                read(tmp_path / name)
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 4200

    def test_what_is_refused_is_closed_again(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        before = os.dup(0)
        os.close(before)
        for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
            with pytest.raises(CheckpointError, match="not a regular file"):
                read_text(path)
        after = os.dup(0)
        os.close(after)
        assert after == before

    def test_a_directory_that_cannot_be_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(path: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        monkeypatch.setattr(os, "scandir", fails)
        with pytest.raises(ModelLoadError, match="cannot be read: Input/output error"):
            resolve_model(tmp_path)


class TestText:
    def test_lone_surrogates(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text('{"a": ["\\ud83d\\ude00"]}')
        assert read_json(path) == {"a": ["\N{GRINNING FACE}"]}
        for text in ('{"a": ["\\ud800"]}', '{"\\uDFFF": 1}', '{"a": "\\ude00\\ud83d"}'):
            path.write_text(text)
            with pytest.raises(CheckpointError, match="not Unicode: surrogates not allowed"):
                read_json(path)

    def test_longer_than_any_text(self, tmp_path: Path) -> None:
        with (tmp_path / "t.json").open("wb") as file:
            file.truncate(MAX_TEXT_BYTES + 1)
        with pytest.raises(CheckpointError, match="at most 67108864 bytes of text"):
            read_json(tmp_path / "t.json")

    @pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "1" * 5000, '{"a": 1' + "0" * 5000 + "}"])
    def test_json_that_cannot_be_parsed(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(CheckpointError, match="is not JSON") as caught:
            read_json(tmp_path / "t.json")
        assert len(str(caught.value)) < 1000


class TestChanges:
    """While a file is open it may be cut off or overwritten by another process."""

    @pytest.fixture(params=["gguf", "safetensors"])
    def opened(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, GgufSource | SafetensorsSource]:
        if request.param == "gguf":
            path = write_gguf(tmp_path / "model.gguf")
            return path, GgufSource(path)
        path = tmp_path / "model.safetensors"
        save_file({"model.norm.weight": torch.ones(32)}, path)
        return path, SafetensorsSource(tmp_path)

    def test_a_file_that_is_cut_off(self, opened: tuple[Path, GgufSource | SafetensorsSource]) -> None:
        path, source = opened
        os.truncate(path, 16)
        with pytest.raises(CheckpointError, match="was changed while it was being loaded") as caught:
            source.tensor("model.norm.weight", torch.float32, CPU)
        assert caught.value.path == path

    def test_a_file_that_is_overwritten(self, opened: tuple[Path, GgufSource | SafetensorsSource]) -> None:
        path, source = opened
        time.sleep(0.02)  # file systems count time in ticks
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"1234")
        with pytest.raises(CheckpointError, match="was changed while it was being loaded"):
            source.tensor("model.norm.weight", torch.float32, CPU)

    def test_a_file_that_is_replaced(self, opened: tuple[Path, GgufSource | SafetensorsSource]) -> None:
        """As downloaders do it: the file that was opened is still whole."""
        path, source = opened
        expected = source.tensor("model.norm.weight", torch.float32, CPU)
        path.with_suffix(".new").write_bytes(b"something else")
        path.with_suffix(".new").replace(path)
        assert torch.equal(source.tensor("model.norm.weight", torch.float32, CPU), expected)


class TestAbsurdGguf:
    """Counts that a file's size allows, and its use does not."""

    @staticmethod
    def refused(path: Path, message: str) -> None:
        started = time.thread_time()
        with pytest.raises(CheckpointError, match=message):
            GgufFile(path)
        assert time.thread_time() - started < 10

    @staticmethod
    def write(path: Path, head: bytes, size: int) -> Path:
        """Write a file that is as long as it claims; all but its head is zeros that take no room on disk."""
        with path.open("wb") as file:
            file.write(head)
            file.truncate(size)
        return path

    @pytest.mark.parametrize(("kind", "count"), [(0, 1 << 33), (8, 1 << 30), (9, 1 << 29), (12, 1 << 30)])
    def test_an_array(self, tmp_path: Path, kind: int, count: int) -> None:
        head = (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count)
        )
        self.refused(self.write(tmp_path / "m.gguf", head, 1 << 34), "more than 8388608 entries")

    def test_a_string(self, tmp_path: Path) -> None:
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 33)
        self.refused(self.write(tmp_path / "m.gguf", head, 1 << 34), "more than 268435456 bytes")

    @pytest.mark.parametrize("counts", [(1 << 40, 0), (0, 1 << 40)])
    def test_tensors_and_keys(self, tmp_path: Path, counts: tuple[int, int]) -> None:
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
        self.refused(self.write(tmp_path / "m.gguf", head, 1 << 34), "it has .* metadata keys and .* tensors")

    def test_overlapping_tensors(self, tmp_path: Path) -> None:
        tensors = {"aa": np.zeros(64, np.float32), "bb": np.zeros(64, np.float32)}
        whole = write_gguf(tmp_path / "m.gguf", {}, tensors).read_bytes()
        offset = whole.index(b"bb") + len(b"bb") + 4 + 8 + 4
        assert struct.unpack_from("<Q", whole, offset) == (256,)
        (tmp_path / "m.gguf").write_bytes(whole[:offset] + struct.pack("<Q", 128) + whole[offset + 8 :])
        self.refused(tmp_path / "m.gguf", "tensors 'aa' and 'bb' overlap")

    def test_a_tensor_without_elements(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor("a", np.zeros((0, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.refused(tmp_path / "m.gguf", r"tensor 'a' of type F32 has shape \[0, 32\]")

    @pytest.mark.parametrize("count", [3, -1, 5000, 2**62, "2", [2], 2.5])
    def test_a_number_of_parts_that_is_none(self, tmp_path: Path, count: Any) -> None:
        path = tmp_path / "m-00001-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        kinds = {int: "int64", str: "string", float: "float32", list: "array"}
        getattr(writer, f"add_{kinds[type(count)]}")("split.count", count)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=r"is one part of"):
            open_gguf(path)

    def test_missing_parts_are_not_all_listed(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m-00001-of-01000.gguf", {"split.count": 1000, **LLAMA}, llama_tensors())
        with pytest.raises(CheckpointError, match="and 996 more into") as caught:
            open_gguf(path)
        assert len(str(caught.value)) < 400


def test_an_index_with_names_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("x" * 5000, "a\0b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="lacks") as caught:
            SafetensorsSource(tmp_path)
        assert len(str(caught.value)) < 600
