"""Run llama-cpp-python: llama.cpp, built for this machine's CPU, on the same file."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from benchmarks.protocol import BenchmarkEngine, EngineSettings, LogitsPath, Prompt, RequestTimes, UnsupportedError

__all__ = ["Engine"]

# The options that its build selects on a processor with AVX2 and nothing newer.
_AVX2: Final = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON"

# Built for AMX, this version crashes with a general protection fault at its first prompt (Granite Rapids, Linux 6.18).
_WITHOUT_AMX: Final = (
    f"{_AVX2} -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
)


class Engine(BenchmarkEngine):
    """Takes tokens directly from ``Llama.generate``, without detokenization or streams."""

    REQUIREMENTS = ("llama-cpp-python==0.3.36",)
    ISAS = MappingProxyType({"avx2": {"CMAKE_ARGS": _AVX2}})
    BUILT_FOR_ISA = True

    @classmethod
    def build_variables(cls, instruction_sets: Collection[str]) -> Mapping[str, str]:
        return {"CMAKE_ARGS": _WITHOUT_AMX} if "amx_int8" in instruction_sets else {}

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._llama = self._load(logits_all=False, n_ctx=settings.max_model_len)

    @property
    def version(self) -> str:
        import llama_cpp

        return str(llama_cpp.__version__)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        if len(prompts) > 1:
            raise UnsupportedError("its Python API runs one sequence at a time")
        (prompt,) = prompts
        start = time.perf_counter()
        tokens = self._llama.generate(prompt.token_ids, temp=0.0, repeat_penalty=1.0)
        times = [time.perf_counter() - start for _ in islice(tokens, max_tokens)]
        return [RequestTimes(times[0], times[-1], len(times), len(prompt.token_ids))]

    def logits(self, token_ids: Sequence[int], path: LogitsPath) -> Any:
        llama = self._load(logits_all=True, n_ctx=len(token_ids))
        if path == "prefill":
            llama.eval(token_ids)
        else:
            for token_id in token_ids:
                llama.eval([token_id])
        return llama.scores[: len(token_ids)]

    def _load(self, *, logits_all: bool, n_ctx: int) -> Any:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = self._settings.lookup
        return Llama(
            self._settings.model,
            n_ctx=n_ctx,
            n_threads=self._settings.num_threads,
            n_threads_batch=self._settings.num_threads,
            logits_all=logits_all or lookup > 0,  # drafts need it: otherwise only 512 rows of logits are kept
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            verbose=False,
        )
