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
from typing import Any, Final

import anyio
import httpx2
import pytest
import torch
from attrs import evolve
from typer.testing import CliRunner

from paged_sdk.cli import serving
from paged_sdk.cli.app import app
from paged_sdk.testing import fake_model

EXAMPLES: Final = Path(__file__).parents[1] / "examples"

SHOWN: Final = {
    "blocking": "",
    "cancel": "after the stream was closed: 0 of",
    "concurrent_requests": "8 answers",
    "demo": "from prefix cache",
    "environment": "by the code: paged, blocks of 16, prefix cache on",
    "fp8_kv_cache": "f8e4m3:",
    "kv_pool": "completion: ",
    "mistralrs_runner": "Usage(",
    "multi_turn": "of them cached",
    "search_and_choose": "is nearest to",
    "speculative": "the same text: True",
    "streaming": "first token after",
    "tools": "answers of the model",
    "topology": "layers 1-2: IsqType.Q8_0",
}
"""Example that runs a model -> a part of what it prints."""

SHOWN_OF_KERNELS: Final = {
    "attention_layer": "decode: (1, 1, 4096) over 1028 keys",
    "chunked_prefill": "rows end after [4096, 8192, 12288] keys",
}
"""Example of operations on tensors -> a part of what it prints, before the largest difference between two ways."""

ARGUMENTS: Final = {"topology": (2,)}
"""Example -> what it is told of the model beside its path."""

SERVICES: Final = ("chat_service", "fastapi_service")
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
        asyncio.run(main(str(tiny_checkpoint), *ARGUMENTS.get(name, ())))
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


def test_the_example_of_canceling_ends_where_the_answer_has_ended_before() -> None:
    async def main() -> None:
        async with fake_model("Done.", max_model_len=70) as model:
            with anyio.fail_after(60):
                await load("cancel").cancel_a_task(model)

    anyio.run(main)


def test_the_environment_decides_what_an_example_leaves_open(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "64")
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_N", "false")
    asyncio.run(load("environment").main(str(tiny_checkpoint)))
    assert "by the environment: paged, blocks of 64, prefix cache off" in capsys.readouterr().out


def test_the_chat_service_answers_and_shows_its_page(tiny_checkpoint: Path) -> None:
    async def ask() -> None:
        async with load("chat_service").service(str(tiny_checkpoint)) as app:
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                body = {
                    "model": "default",
                    "messages": [{"role": "user", "content": "Hi!"}],
                    "max_tokens": 8,
                    "temperature": 0,
                }
                body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                assert answer["usage"]["completion_tokens"] == 8
                page = await client.get("/")
                assert page.headers["content-type"].startswith("text/html")

    asyncio.run(ask())


def test_the_file_of_the_chat_service_says_what_its_code_says(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serving, "keep_serving", lambda models, terminal, **settings: served.append((models, settings)))
    arguments = ["serve", "--config", str(EXAMPLES / "chat_service.json"), "-m", str(tiny_checkpoint)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    ((model,), settings) = served[0]
    expected = load("chat_service").builder(str(tiny_checkpoint))
    assert evolve(model.builder.settings, logging=False) == expected.settings
    assert (settings["port"], settings["sampling"]) == (8080, {"temperature": 0.7, "top_p": 0.9})


@pytest.mark.smollm2
def test_the_demo_runs_on_the_embedded_model() -> None:
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], capture_output=True, text=True, check=False, timeout=200
    )
    assert finished.returncode == 0, finished.stderr
    assert "sunlight" in finished.stdout
    assert SHOWN["demo"] in finished.stdout
