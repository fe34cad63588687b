"""Keep quantized weights between two starts: the second reads what the first has made, or makes it anew."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from attrs import evolve

import tiny
from native_weights import needs_library
from paged_sdk import IsqType, LayerTopology, SamplingParams, TextModelBuilder, Topology
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.quantized.grouped_matrix import UnreadGroupedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.quant.isq import quantize_stored
from paged_sdk.weights.quantized_cache import Quantized, QuantizedCache

ROWS, COLS = 48, 256


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def quantized(isq: IsqType) -> Quantized:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    return quantize_stored(DenseMatrix(weight), isq, None, torch.device("cpu"))


def values(matrix: Quantized, parts: tuple[int, ...] = (0, 16, 48)) -> torch.Tensor:
    return torch.cat([matrix.rows(slice(first, last)).decoded() for first, last in pairwise(parts)])


def unmade(isq: IsqType) -> Quantized:
    """Return the matrix in a form that cannot be made."""
    matrix = quantized(isq)

    def read(first: int, last: int) -> NoReturn:
        raise AssertionError(f"rows {first} to {last} are quantized again")

    if isinstance(matrix, UnreadGroupedMatrix):
        return UnreadGroupedMatrix(
            shape=matrix.shape,
            read=read,
            group_size=matrix.group_size,
            has_minima=matrix.has_minima,
            bits=matrix.bits,
            levels=matrix.levels,
        )
    assert not isinstance(matrix.stored, torch.Tensor)
    return evolve(matrix, stored=evolve(matrix.stored, read=read))


def write(path: Path, isq: IsqType, identity: str = "one") -> torch.Tensor:
    cache = QuantizedCache(path, identity)
    made = values(cache.cached("name", quantized(isq)))
    cache.close(is_complete=True)
    return made


@pytest.mark.parametrize("isq", IsqType)
def test_what_is_kept_is_what_was_made(isq: IsqType, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    made = write(path, isq)
    assert torch.equal(made, values(quantized(isq)))
    cache = QuantizedCache(path, "one")
    kept = cache.cached("name", unmade(isq))
    assert torch.equal(values(kept), made)
    # Rows in other parts than they were made in.
    assert torch.equal(values(kept, (0, 1, 20, 48)), made)
    assert torch.equal(kept.rows(slice(8, 40)).rows(slice(1, 30)).decoded(), made[9:38])
    cache.close(is_complete=True)
    assert os.listdir(tmp_path) == ["kept"]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, "cannot be used"),
        (lambda data: b"", "cannot be used"),
        (lambda data: data[:9], "cannot be used"),
        (lambda data: data + b"more", "cannot be used"),
        (flipped(-30), "cannot be used"),
        (flipped(0), "cannot be used"),
        (flipped(100), "does not hold name"),
    ],
    ids=["cut", "empty", "short", "longer", "index", "magic", "part"],
)
def test_what_is_damaged_is_made_anew(
    damage: Callable[[bytes], bytes], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept"
    made = write(path, IsqType.Q4K)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        assert torch.equal(write(path, IsqType.Q4K), made)
    assert [says in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [True]
    # A part that is damaged shows when it is read: the next start writes the file.
    assert torch.equal(write(path, IsqType.Q4K), made)
    cache = QuantizedCache(path, "one")
    assert torch.equal(values(cache.cached("name", unmade(IsqType.Q4K))), made)
    cache.close(is_complete=True)


def test_whatever_happens_to_a_file_the_weights_are_right(tmp_path: Path) -> None:
    path, rng = tmp_path / "kept", random.Random(5)
    for isq in (IsqType.Q4K, IsqType.AFQ4):
        made = write(path, isq)
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole)
            for _ in range(rng.choice([1, 1, 4])):
                # Half of the damage is done to the index, which is at the end.
                place = rng.randrange(len(data) - 400 if rng.random() < 0.5 else 0, len(data))
                data[place] = rng.randrange(256)
            path.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
            assert torch.equal(write(path, isq), made)
        path.unlink(missing_ok=True)


def test_another_identity_replaces_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kept"
    write(path, IsqType.Q4K)
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        write(path, IsqType.Q4K, "other")
    assert "of other weights or another version" in caplog.text
    cache = QuantizedCache(path, "other")
    values(cache.cached("name", unmade(IsqType.Q4K)))
    cache.close(is_complete=True)


def test_a_loading_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = QuantizedCache(tmp_path / "kept", "one")
    values(cache.cached("name", quantized(IsqType.Q4K)))
    cache.close(is_complete=False)
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import os, pathlib; from paged_sdk.weights.quantized_cache import _NewFile; import torch; "
        f"_NewFile(pathlib.Path({str(tmp_path / 'kept')!r})).written((0, 1), torch.zeros(4096).byte()); os._exit(130)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 130
    assert not os.listdir(tmp_path)


@needs_library
def test_a_file_system_without_files_that_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.weights.quantized_cache._DESCRIPTORS", "/nowhere")
    test_what_is_kept_is_what_was_made(IsqType.Q4K, tmp_path)
    write(tmp_path / "kept", IsqType.Q4K, "other")
    test_a_loading_that_fails_leaves_nothing(tmp_path / "empty")


@pytest.mark.parametrize("call", ["write", "replace", "link"])
def test_a_disk_that_is_full_keeps_nothing_and_loading_goes_on(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    expected = values(quantized(IsqType.Q4K))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert torch.equal(write(tmp_path / "kept", IsqType.Q4K), expected)
    assert "No space left on device" in caplog.text
    assert not os.listdir(tmp_path)


def test_a_name_that_cannot_be_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert torch.equal(write(tmp_path / ("a" * 300), IsqType.Q4K), values(quantized(IsqType.Q4K)))
    assert "are not cached" in caplog.text


def test_a_directory_that_cannot_be_made_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file" / "kept", IsqType.Q4K)
    assert "are not cached" in caplog.text


async def _logprobs(builder: TextModelBuilder) -> list[float]:
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    async with builder.build() as model:
        response = await model.send_completion_request(list(range(3, 67)), sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


@needs_library
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "isq"), [("llama", IsqType.Q4K), ("phi3", IsqType.AFQ4), ("qwen3_moe", IsqType.Q8_0)]
)
async def test_the_second_start_does_not_quantize(
    family: str, isq: IsqType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = tiny.make_checkpoint(family, tmp_path / "checkpoint"), tmp_path / "kept"
    topology = Topology.empty().with_range(range(1), LayerTopology(isq=IsqType.Q5_0))
    builder = TextModelBuilder(checkpoint).with_force_cpu().with_isq(isq).with_topology(topology)
    plain = await _logprobs(builder)
    assert await _logprobs(builder.with_isq_cache(directory)) == plain
    (file,) = directory.iterdir()
    written = file.stat()

    def quantize(*args: object) -> None:
        raise AssertionError("it is quantized again")

    with monkeypatch.context() as patch:
        if isq is not IsqType.AFQ4:  # whose form is found from a row
            patch.setattr("paged_sdk.quant.isq.quantize", quantize)
        assert await _logprobs(builder.with_isq_cache(directory)) == plain
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    # Other settings have a file of their own; the checkpoint's own change makes its file anew.
    await _logprobs(builder.with_isq(IsqType.Q6K).with_isq_cache(directory))
    assert len(list(directory.iterdir())) == 2
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    assert await _logprobs(builder.with_isq_cache(directory)) == plain
    assert len(list(directory.iterdir())) == 2
    assert file.stat().st_mtime_ns != written.st_mtime_ns


@pytest.mark.anyio
async def test_where_nothing_is_quantized_a_warning_says_that_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "kept"
    builder = TextModelBuilder(tiny.make_checkpoint("llama", tmp_path / "checkpoint")).with_force_cpu()
    with caplog.at_level(logging.WARNING, logger="paged_sdk"):
        await _logprobs(builder.with_isq_cache(directory))
    assert f"Nothing is cached in {directory}" in caplog.text
    assert not directory.exists()


@pytest.mark.parametrize("value", [7, None, b"x", ""])
def test_what_is_no_directory(value: object) -> None:
    with pytest.raises(ConfigError, match="with_isq_cache"):
        TextModelBuilder("m").with_isq_cache(value)  # type: ignore[arg-type]
