"""Run openvino-genai: its continuous batching pipeline on the same file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes

__all__ = ["Engine"]

# GiB of KV cache: more than any task of the benchmark needs.
_CACHE_SIZE = 1


class Engine(BenchmarkEngine):
    """Steps the pipeline itself, to get the time of every token."""

    REQUIREMENTS = ("openvino-genai==2026.4.1.0",)

    def __init__(self, settings: EngineSettings) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_SIZE
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings.num_threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
        self._num_requests = 0

    @property
    def version(self) -> str:
        import openvino_genai

        return str(openvino_genai.__version__)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        config = GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        start = time.perf_counter()
        handles = []
        for prompt in prompts:
            token_ids = Tensor(np.array([prompt.token_ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, token_ids, config))
            self._num_requests += 1
        times: list[list[float]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for handle, seen in zip(handles, times, strict=True):
                while handle.can_read():
                    seen += [now for output in handle.read().values() for _ in output.generated_ids]
        return [
            RequestTimes(seen[0], seen[-1], len(seen), len(prompt.token_ids))
            for seen, prompt in zip(times, prompts, strict=True)
        ]
