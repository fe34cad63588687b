"""Define fixtures that several packages' tests share. This file also puts its directory on the import path."""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is first imported, which transformers does for all that import it.
    os.environ["TRITON_INTERPRET"] = "1"

import tiny
from paged_sdk import (
    Model,
    TextModelBuilder,
    embedded_model_path,
)
from paged_sdk.chat.text_processor import TextProcessor, text_processor_from_gguf
from paged_sdk.kernels.native import library
from paged_sdk.kernels.native.library import why_not
from paged_sdk.weights.checkpoint import open_checkpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, help="the native library to test instead of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test with a native library that was not built again: its tests would be skipped, not fail."""
    path: Path | None = config.getoption("--native-library")
    if path is not None:
        library._PATH = path.resolve(strict=True)
    reason = why_not()
    if reason is not None and "setup.py" in reason:
        raise pytest.UsageError(reason)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: tiny matrices gain nothing from more, and slow down a hundredfold on a busy machine by waiting
    for them.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def triton_device() -> Iterator[torch.device]:
    """Return the device of tensors for Triton kernels: without CUDA, Triton's interpreter runs them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with pytest.MonkeyPatch.context() as patch:
        _let_the_interpreter_loop(patch)
        yield torch.device("cpu")


def _let_the_interpreter_loop(patch: pytest.MonkeyPatch) -> None:
    """Let Triton 3.6's interpreter loop: it takes a loop's bounds from arrays of one element, which numpy 2.4
    refuses.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama with random weights, in float32."""
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the embedded SmolLM2-135M-Instruct, a GGUF file."""
    return embedded_model_path()


@pytest.fixture(scope="session")
def smollm2_text(smollm2: Path) -> TextProcessor:
    """Return the text processor of SmolLM2 alone."""
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.metadata is not None
    try:
        return text_processor_from_gguf(checkpoint.metadata)
    finally:
        checkpoint.source.close()


@pytest.fixture
def builder(tiny_checkpoint: Path) -> TextModelBuilder:
    """Return a builder of the tiny llama in float32 on the CPU."""
    return TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every test marked ``anyio`` under both backends."""
    backend: str = request.param
    return backend


@pytest.fixture
async def model(builder: TextModelBuilder) -> AsyncIterator[Model]:
    async with builder.build() as model:
        yield model


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Restore the logging settings, so that a test that turns logs on does so for itself only."""
    logger = logging.getLogger("paged_sdk")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def _collect_garbage_of_async_tests() -> Iterator[None]:
    """Collect garbage, so that a coroutine or stream that a test leaves behind fails that test, not a later one."""
    yield
    gc.collect(0)
