"""mistralrs: the Python package of mistral.rs, CPU wheel, on the same file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes

__all__ = ["Engine"]


class Engine(BenchmarkEngine):
    """It takes text only, and its plain completions do not stream: times are what its usage says, in milliseconds."""

    REQUIREMENTS = ("mistralrs==0.9.5",)

    def __init__(self, settings: EngineSettings) -> None:
        from mistralrs import Runner, Which

        path = Path(settings.model)
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self._runner = Runner(which, max_seqs=settings.max_num_seqs)

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version("mistralrs")

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, max_tokens, start), prompts))

    def _complete(self, prompt: Prompt, max_tokens: int, start: float) -> RequestTimes:
        from mistralrs import CompletionRequest

        request = CompletionRequest(
            prompt=prompt.text, model="default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        usage: Any = self._runner.send_completion_request(request).usage
        last = time.perf_counter() - start
        return RequestTimes(last - usage.total_completion_time_sec, last, usage.completion_tokens, usage.prompt_tokens)
