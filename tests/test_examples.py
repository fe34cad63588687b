"""Every example runs: all of them on a tiny model, the demo on the real one."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import anyio
import pytest
import torch

EXAMPLES: Final = Path(__file__).parents[1] / "examples"

SHOWN: Final = {
    "blocking": "",
    "cancel": "after the stream was closed: 0 of",
    "concurrent_requests": "8 answers",
    "demo": "from prefix cache",
    "fp8_kv_cache": "f8e4m3:",
    "mistralrs_runner": "Usage(",
    "multi_turn": "of them cached",
    "paged_attn": "completion: ",
    "search_and_choose": "is nearest to",
    "streaming": "first token after",
    "tools": "requests",
}
"""Example that runs a model -> a part of what it prints."""

SHOWN_OF_KERNELS: Final = {
    "chunked_prefill": "rows end after [4096, 8192, 12288] keys",
    "paged_attention": "decode: (1, 1, 4096) over 1028 keys",
}
"""Example of operations on tensors -> a part of what it prints, before the largest difference between two ways."""

SERVICES: Final = ("fastapi_service",)
"""Examples that run until they are ended: each has a test of its own."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for each other over tiny matrices cost forty times the work on a busy
    machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*SHOWN, *SHOWN_OF_KERNELS, *SERVICES])


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = load(name).main
    if inspect.iscoroutinefunction(main):
        asyncio.run(main(str(tiny_checkpoint)))
    else:
        main(str(tiny_checkpoint))
    assert SHOWN[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", SHOWN_OF_KERNELS)
def test_example_of_kernels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    shown, _, difference = capsys.readouterr().out.rpartition(": ")
    assert SHOWN_OF_KERNELS[name] in shown
    assert float(difference) < 1e-5


@pytest.mark.parametrize("name", ["cancel", "streaming"])
def test_example_under_trio(name: str, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(load(name).main, str(tiny_checkpoint), backend="trio")
    assert SHOWN[name] in capsys.readouterr().out


@pytest.mark.smollm2
def test_the_demo_runs_on_the_embedded_model() -> None:
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], capture_output=True, text=True, check=False, timeout=200
    )
    assert finished.returncode == 0, finished.stderr
    assert "sky" in finished.stdout
    assert SHOWN["demo"] in finished.stdout
