"""Asks llama.cpp about GGUF files, where a package is installed that carries it: it is the format's own program."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import frozen

__all__ = ["Answer", "LlamaCpp"]


@frozen
class Answer:
    """Holds what llama.cpp says after a prompt.

    :ivar tokens: greedy ones
    :ivar logprobs: of the likeliest tokens right after the prompt, by id
    """

    tokens: list[int]
    logprobs: Mapping[int, float]
    num_drafted: int = 0
    num_accepted: int = 0


class LlamaCpp:
    """Runs a GGUF file in llama.cpp, in this process, with one thread and a KV cache of float32.

    A test that makes one is skipped where the package is not installed.

    :param mmproj: the file of its image encoder
    :param reads: what an encoder's file is for: vectors of texts, or to rank them; None: it generates text
    :param drafts: most drafts at a time, of an assistant or of the model's layer for multi-token prediction; 0: none
    :param assistant: the assistant's file; None: the layer drafts
    """

    def __init__(
        self,
        path: Path,
        mmproj: Path | None = None,
        *,
        reads: Literal["vectors", "ranks"] | None = None,
        drafts: int = 0,
        assistant: Path | None = None,
    ) -> None:
        xllamacpp: Any = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        if mmproj is not None:
            params.mmproj.path, params.mmproj_use_gpu = str(mmproj), False
        params.n_ctx, params.n_parallel, params.n_threads_http = 512, 1, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.embedding = reads is not None
        if reads == "ranks":
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
        if drafts:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
            drafter = params.speculative.draft
            drafter.mparams.path = "" if assistant is None else str(assistant)
            drafter.n_max, drafter.cpuparams.n_threads = drafts, 1
            drafter.cache_type_k = drafter.cache_type_v = params.cache_type_k
        params.warmup, params.fit_params, params.cache_ram_mib, params.verbosity = False, False, 0, -1
        self._server = xllamacpp.Server(params)

    def complete(
        self, prompt: Sequence[int], count: int, *, banned: Sequence[int] = (), temperature: float = 0.0
    ) -> Answer:
        """Go on after a prompt.

        :param count: how many tokens to say
        :param banned: tokens that are never said
        :param temperature: above 0: tokens are drawn, each time the same ones
        """
        wanted = {
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": temperature,
            "seed": 1,
            "logit_bias": [[token, False] for token in banned],
            "logprobs": 8,
            "cache_prompt": False,
            "verbose": True,
            "return_tokens": True,
        }
        answer = self._server.handle_completions(wanted)
        verbose = answer["__verbose"]
        first = verbose["completion_probabilities"][0]["top_logprobs"] if verbose["completion_probabilities"] else ()
        logprobs, timings = {each["id"]: each["logprob"] for each in first}, verbose["timings"]
        drafted, accepted = (timings.get(key, 0) for key in ("draft_n", "draft_n_accepted"))
        return Answer(verbose["tokens"], logprobs, drafted, accepted)

    def look(self, before: str, image: bytes, after: str, count: int) -> tuple[int, Answer]:
        """Go on after a prompt with an image.

        :param image: the bytes of a file
        :returns: how many tokens the prompt has, and what is said
        """
        marker = self._ask("props")["media_marker"]
        prompt = {
            "prompt_string": f"{before}{marker}{after}",
            "multimodal_data": [base64.b64encode(image).decode()],
        }
        wanted = {"n_predict": count, "temperature": 0.0, "n_probs": 8, "cache_prompt": False, "return_tokens": True}
        answer = self._ask("completion", {"prompt": prompt, "ignore_eos": True, **wanted})
        first = answer["completion_probabilities"][0]["top_logprobs"]
        found = Answer(answer["tokens"], {each["id"]: each["logprob"] for each in first})
        return answer["tokens_evaluated"], found

    def vector(self, text: str) -> list[float]:
        """Return the vector of a text."""
        found: list[float] = self._ask("v1/embeddings", {"input": text})["data"][0]["embedding"]
        return found

    def ranks(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return what the model makes of each document with a query."""
        answer = self._ask("v1/rerank", {"query": query, "documents": list(documents)})
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        return [found[place] for place in range(len(documents))]

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return a text's tokens; marks in it are tokens too."""
        tokens: list[int] = self._ask("tokenize", {"content": text, "add_special": add_special, "parse_special": True})[
            "tokens"
        ]
        return tokens

    def _ask(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._server.listening_address}/{path}",
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
