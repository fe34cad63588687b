"""Run mistralrs, the Python package of mistral.rs, CPU wheel, on the same file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes, UnsupportedError

__all__ = ["Engine"]


class Engine(BenchmarkEngine):
    """Accepts only text. Plain completions do not stream, so times come from the usage, in milliseconds."""

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
        from mistralrs import CompletionRequest

        if len(prompts) > 1:
            # Chats stream concurrently, but prompts that arrive together fail: "input tensor is not contiguous".
            raise UnsupportedError("its completions run one at a time")
        (prompt,) = prompts
        start = time.perf_counter()
        request = CompletionRequest(
            prompt=prompt.text, model="default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        usage: Any = self._runner.send_completion_request(request).usage
        last = time.perf_counter() - start
        first = last - usage.total_completion_time_sec
        return [RequestTimes(first, last, usage.completion_tokens, usage.prompt_tokens)]
