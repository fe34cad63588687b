"""Run this project, through its public async API."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes

if TYPE_CHECKING:
    from paged_sdk import Model, SamplingParams

__all__ = ["Engine", "read_streams"]


class Engine(BenchmarkEngine):
    """Reads every request as a stream in a separate task, as an application does; times are the reader's."""

    REQUIREMENTS = ()
    FORMATS = ("gguf", "directory")
    # Variables of torch and oneDNN. The native library reads no variable; _hold_to limits it.
    ISAS = MappingProxyType({"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}})

    def __init__(self, settings: EngineSettings) -> None:
        if settings.isa is not None:
            _hold_to(settings.isa)
        from paged_sdk import TextModelBuilder

        builder = (
            TextModelBuilder(settings.model)
            .with_num_threads(settings.num_threads)
            .with_max_model_len(settings.max_model_len)
            .with_max_num_seqs(settings.max_num_seqs)
        )
        if settings.dtype is not None and Path(settings.model).is_dir():  # else it would dequantize GGUF blocks
            builder = builder.with_dtype(settings.dtype)

        async def build() -> Model:
            return await builder.build()

        self._runner = asyncio.Runner()
        self._model = self._runner.run(build())

    @property
    def version(self) -> str:
        import paged_sdk
        from paged_sdk.kernels.native import library

        native = library.load()
        return f"{paged_sdk.__version__} ({'no native library' if native is None else native.isa})"

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        return self._runner.run(read_streams(self._model, prompts, max_tokens))

    def event_loop_lag(self, prompts: Sequence[Prompt], max_tokens: int, interval: float) -> list[float]:
        return self._runner.run(self._event_loop_lag(prompts, max_tokens, interval))

    async def _event_loop_lag(self, prompts: Sequence[Prompt], max_tokens: int, interval: float) -> list[float]:
        work = asyncio.create_task(read_streams(self._model, prompts, max_tokens))
        lags: list[float] = []
        while not work.done():
            before = time.perf_counter()
            await asyncio.sleep(interval)
            lags.append(time.perf_counter() - before - interval)
        await work
        return lags


def _hold_to(isa: str) -> None:
    """Limit the native library, which is loaded once per process, to an instruction set."""
    assert "torch" not in sys.modules
    from paged_sdk.kernels.native import library

    levels = library.available_levels()
    if isa not in levels:
        raise RuntimeError(f"the native library has {', '.join(levels) or 'no level'} here, not {isa}")
    with mock.patch.object(library, "available_levels", return_value=levels[levels.index(isa) :]):
        loaded = library.load()
    assert loaded is not None
    assert loaded.isa == isa


async def read_streams(model: Model, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
    """Implement :meth:`BenchmarkEngine.generate` on a model."""
    start = time.perf_counter()

    async def read(prompt: Prompt) -> RequestTimes:
        first, last = 0.0, 0.0
        stream = model.stream_completion_request(prompt.token_ids, _sampling(max_tokens))
        async for _ in stream:
            last = time.perf_counter() - start
            first = first or last
        usage = stream.response_so_far().usage
        if first == last:
            # A late reader got all tokens in one chunk: only the engine knows the time of the first one.
            first = max(0.0, last - usage.total_completion_time_sec)
        return RequestTimes(first, last, usage.completion_tokens, usage.prompt_tokens)

    return await asyncio.gather(*map(read, prompts))


def _sampling(max_tokens: int) -> SamplingParams:
    from attrs import evolve

    from paged_sdk import SamplingParams

    return evolve(SamplingParams.deterministic(), max_len=max_tokens, ignore_eos=True)
