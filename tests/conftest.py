"""Define fixtures that several packages' tests share. This file also puts its directory on the import path."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import os
import signal
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
from paged_sdk.build import collector
from paged_sdk.chat import template
from paged_sdk.chat.text_processor import TextProcessor, text_processor_from_gguf
from paged_sdk.kernels.native import library
from paged_sdk.kernels.native.library import why_not
from paged_sdk.weights.checkpoint import open_checkpoint
from shallow import make_shallow
from thinning import left_out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, help="the native library to test instead of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C back, pause garbage collection, and refuse to test with a native library that was not built again.

    The tests of such a library would be skipped, not fail.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts `make test &` without Ctrl-C, and every program of a test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path: Path | None = config.getoption("--native-library")
    if path is not None:
        library._PATH = path.resolve(strict=True)
    reason = why_not()
    if reason is not None and "setup.py" in reason:
        raise pytest.UsageError(reason)
    gc.disable()  # of what collecting tests makes, nothing is garbage: looking for it takes a third of that time


def pytest_collection_finish() -> None:
    """Leave the tests and imported modules out of garbage collections, which would take half a second each, and the
    loggers of torch to their parents: of every logger by itself, pytest takes and gives back six times in each test.
    There are 50, which is half of the time that a test takes that does nothing.
    """
    # At the end of every run, Hypothesis is imported and looks for what refers to trio's random numbers: among frozen
    # objects it would find nothing, and warn.
    importlib.import_module("hypothesis")
    gc.freeze()
    gc.set_threshold(2000, 10, 20)  # a full collection every 70,000 new objects took 4 % of a test-run's time
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what ``thinned`` leaves out, before pytest looks at marks."""
    for item in left_out(items):
        item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: tiny matrices gain nothing from more, and slow down a hundredfold on a busy machine by waiting
    for them.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _templates_compiled_once() -> Iterator[None]:
    """Compile each chat template once: nearly all models have the same, of whose loading that was a fifth. What has
    been compiled holds nothing of a rendering.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_metered", functools.lru_cache(maxsize=64)(template._metered))
        yield


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects_uncounted() -> Iterator[None]:
    """Let loading a model not count the objects that are frozen, of which it only asks whether there are any: here are
    millions, and counting them took 0.27 s of the 0.4 s that a tiny model takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "_make_old", lambda: None)
        yield


@pytest.fixture(scope="session")
def triton_device() -> Iterator[torch.device]:
    """Return the device of tensors for Triton kernels: without CUDA, Triton's interpreter runs them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with pytest.MonkeyPatch.context() as patch:
        _let_the_interpreter_loop(patch)
        _let_the_interpreter_hurry(patch)
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


def _let_the_interpreter_hurry(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter look for the language's functions once, not in each call of a function: that is a third
    of its time. A function that has been replaced for the launch is none of them, so the first one tells. A shape is
    made once, not for each tensor: another fifth. A function that a kernel calls finds the language replaced from
    its second call on: another tenth. And shapes and types that are one object are not compared: another quarter.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    is_builtin = core.is_builtin
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(language: Any, builder: Any, scope: Any) -> None:
        if language not in found:
            found[language] = [each for each in inspect.getmembers(language) if is_builtin(each[1])]
        if found[language] and is_builtin(getattr(language, found[language][0][0])):
            for name, member in found[language]:
                interpreter._patch_attr(language, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch_lang, replaced_for = interpreter._patch_lang, set[Any]()

    def patch_lang_once(function: Any) -> Any:
        if interpreter.tl.static_print is not print:  # what else it is while a kernel runs: this is a launch
            replaced_for.clear()
        elif function in replaced_for:
            return interpreter._LangPatchScope()  # which restores nothing; the launch's does
        replaced_for.add(function)
        return patch_lang(function)

    patch.setattr(interpreter, "_patch_lang", patch_lang_once)
    numpys_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpys_dtype(scalar)
        return dtypes[scalar.name]

    patch.setattr(interpreter, "_get_np_dtype", get_np_dtype)
    make_block_type, block_types = core.block_type.__init__, dict[tuple[Any, ...], tuple[Any, ...]]()
    same_shapes = dict[tuple[Any, ...], Any]()
    make_tensor, shapes = core.tensor.__init__, dict[int, tuple[Any, ...]]()

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key: tuple[Any, ...] = (element_ty.name, id(shape))
        if key not in block_types:
            key = (element_ty.name, *(each.value if type(each) is core.constexpr else each for each in shape))
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            kept = same_shapes.setdefault(key[1:], self.shape)
            block_types[key] = block_types[element_ty.name, id(kept)] = (kept, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = block_types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        own = id(type.shape) if type.is_block() else 0  # those of block types are kept
        if own not in shapes:
            make_tensor(self, handle, type)
            shapes[own] = (self.numel, self.shape, type.shape if own else None)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape, _ = shapes[own]

    semantic: Any = importlib.import_module("triton.language.semantic")
    broadcast, equal = semantic.TritonSemantic.broadcast_impl_value, core.dtype.__eq__

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(core.block_type, "__init__", init_block_type)
    patch.setattr(core.tensor, "__init__", init_tensor)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama with random weights, in float32."""
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the embedded SmolLM2-135M-Instruct, a GGUF file."""
    return embedded_model_path()


@pytest.fixture(scope="session")
def shallow_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2's first three of 30 layers, for tests of its arithmetic and not of what it says."""
    return make_shallow(smollm2, tmp_path_factory.mktemp("shallow") / smollm2.name, num_layers=3)


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


# Of a module, since Hypothesis refuses fixtures of single tests.
@pytest.fixture(scope="module", params=["native", "torch"])
def every_draw(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have samplers on the CPU draw tokens and compute logprobs natively, and once more by torch."""
    if request.param == "native" and why_not() is not None:
        pytest.skip(why_not() or "")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            for module in ("token_draw", "logprobs"):
                patch.setattr(f"paged_sdk.sampling.{module}.load", lambda: None)
        yield


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
