"""Run transformers: ``generate`` on the file's weights, dequantized; a batch is static."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes, UnsupportedError

__all__ = ["Engine"]


class Engine(BenchmarkEngine):
    """Generates for prompts of one length as one batch, without padding."""

    REQUIREMENTS = ("torch==2.13.0", "transformers==5.23.0")
    FORMATS = ("directory",)

    def __init__(self, settings: EngineSettings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype or "auto")

    @property
    def version(self) -> str:
        import transformers

        return str(transformers.__version__)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        import torch
        from transformers import StoppingCriteriaList

        if len({len(prompt.token_ids) for prompt in prompts}) > 1:
            raise UnsupportedError("a static batch wants prompts of one length")
        token_ids = torch.tensor([prompt.token_ids for prompt in prompts])
        times: list[float] = []
        start = time.perf_counter()

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter() - start)
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([note_time]),
        )
        return [RequestTimes(times[0], times[-1], len(times), len(prompt.token_ids)) for prompt in prompts]
