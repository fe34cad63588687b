"""Asks llama.cpp about GGUF files, where a package is installed that carries it: it is the format's own program."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


class LlamaCpp:
    """Runs a GGUF file in llama.cpp, in this process, with one thread and a KV cache of float32.

    A test that makes one is skipped where the package is not installed.
    """

    def __init__(self, path: Path) -> None:
        xllamacpp: Any = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_threads_http = 512, 1, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.fit_params, params.cache_ram_mib, params.verbosity = False, False, 0, -1
        self._server = xllamacpp.Server(params)

    def complete(self, prompt: Sequence[int], count: int, *, banned: Sequence[int] = ()) -> Answer:
        """Go on after a prompt.

        :param count: how many tokens to say
        :param banned: tokens that are never said
        """
        wanted = {
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0.0,
            "logit_bias": [[token, False] for token in banned],
            "logprobs": 8,
            "cache_prompt": False,
            "verbose": True,
            "return_tokens": True,
        }
        answer = self._server.handle_completions(wanted)
        verbose = answer["__verbose"]
        first = verbose["completion_probabilities"][0]["top_logprobs"] if verbose["completion_probabilities"] else ()
        return Answer(verbose["tokens"], {each["id"]: each["logprob"] for each in first})

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return a text's tokens; marks in it are tokens too."""
        content = json.dumps({"content": text, "add_special": add_special, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            tokens: list[int] = json.load(response)["tokens"]
        return tokens
