"""A model does not notice what happens to its files once it is loaded, whatever form its weights have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from native_weights import needs_library
from paged_sdk import GgufModelBuilder, Model, SamplingParams, TextModelBuilder

pytestmark = pytest.mark.anyio

Builder = Callable[[Path], TextModelBuilder | GgufModelBuilder]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def hide_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.build.assembly.load", lambda: None)


async def greedy(model: Model) -> str:
    prompt = "The quick brown fox"
    response = await model.send_completion_request(prompt, SamplingParams(temperature=0, max_len=12))
    return response.choices[0].text


def spoil(path: Path, how: str) -> None:
    """Cut a file off, or overwrite it in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "cut off":
            file.truncate(0)
        else:
            file.write(os.urandom(size))


def is_in_use(path: Path) -> bool:
    """Return whether this process maps a file or has it open, where the system says so."""
    maps, files = Path("/proc/self/maps"), Path("/proc/self/fd")
    if not maps.exists():
        return False
    return str(path) in maps.read_text() or str(path) in {os.path.realpath(file) for file in files.iterdir()}


CASES: list[object] = [
    pytest.param("Q8_0", lambda path: GgufModelBuilder(path), id="blocks"),
    pytest.param("Q8_0", lambda path: GgufModelBuilder(path).with_lean_memory(), id="blocks, lean"),
    pytest.param("Q8_0", lambda path: GgufModelBuilder(path).with_dtype("float32"), id="blocks decoded"),
    pytest.param("F32", lambda path: GgufModelBuilder(path).with_dtype("float32"), id="gguf float32"),
    pytest.param("BF16", lambda path: GgufModelBuilder(path), id="gguf bfloat16"),
    pytest.param("safetensors", lambda path: TextModelBuilder(path).with_dtype("float32"), id="safetensors"),
]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize(("kind", "builder"), CASES)
async def test_files_that_change_under_a_running_model(
    kind: str, builder: Builder, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        hide_library(monkeypatch)
    if kind == "safetensors":
        path = tiny.make_checkpoint("llama", tmp_path)
        weights = path / "model.safetensors"
    else:
        path = weights = tiny.make_gguf(tmp_path, quantization=kind, tie_word_embeddings=True)
    async with builder(path).with_force_cpu().with_num_threads(1).with_prefix_cache_n(0).build() as model:
        assert not is_in_use(weights)
        expected = await greedy(model)
        for how in ("overwritten", "cut off"):
            spoil(weights, how)
            assert await greedy(model) == expected
