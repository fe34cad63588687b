"""Define what the driver and the engines' processes say to each other: one JSON object per line.

The driver sends ``{"do": ..., ...}``; the engine's process answers each with ``{"result": ...}``,
``{"unsupported": reason}`` or ``{"failed": reason}``. Its first line, unasked, says that the model is loaded.

Engines run in environments of their own, so this file and ``worker.py`` use the standard library alone.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

__all__ = ["BenchmarkEngine", "EngineSettings", "Format", "LogitsPath", "Prompt", "RequestTimes", "UnsupportedError"]

Format = Literal["gguf", "directory"]
"""A GGUF file, or a directory of config.json, safetensors and tokenizer.json."""

LogitsPath = Literal["prefill", "decode"]
"""Logits of a text computed in chunks, or token by token."""


class UnsupportedError(Exception):
    """Says that the engine's Python API cannot do this; the message says why."""


@dataclass(frozen=True)
class EngineSettings:
    """Says how to load an engine.

    :ivar model: a GGUF file or directory, as the engine's ``FORMATS`` say
    :ivar num_threads: CPU threads
    :ivar max_model_len: tokens in a sequence, prompt and output together
    :ivar max_num_seqs: sequences at once
    :ivar dtype: the dtype of a directory's weights, which is also computed in; None: the engine's choice
    :ivar lookup: the most drafts of a step that the engine looks up in the prompt, if it can; 0: none
    :ivar isa: the instruction set that the engine is held to, one of its ``ISAS``; None: the best of the processor
    """

    model: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    dtype: str | None = None
    lookup: int = 0
    isa: str | None = None


@dataclass(frozen=True)
class Prompt:
    """Holds the same prompt for engines that take token ids and for those that take text."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class RequestTimes:
    """Holds the times of one request of a batch.

    :ivar first: seconds from the batch's submission to the request's first token
    :ivar last: seconds to its last token
    """

    first: float
    last: float
    num_tokens: int
    num_prompt_tokens: int


class BenchmarkEngine(ABC):
    """Represents an engine as the benchmark uses it: the constructor loads it, and it runs one batch at a time.

    :cvar REQUIREMENTS: the packages that pip installs into the engine's environment; empty: it runs in this project's
    :cvar UNWANTED: the packages that come with them and are removed again
    :cvar FORMATS: the formats that it loads, the preferred one first
    :cvar ISAS: the instruction sets that it can be held to, and the environment variables that do it
    :cvar BUILT_FOR_ISA: the variables are for pip, which builds its packages for one instruction set: an environment
        for each
    """

    REQUIREMENTS: ClassVar[tuple[str, ...]]
    UNWANTED: ClassVar[tuple[str, ...]] = ()
    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)
    ISAS: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    BUILT_FOR_ISA: ClassVar[bool] = False

    @classmethod
    def build_variables(cls, instruction_sets: Collection[str]) -> Mapping[str, str]:
        """Return environment variables for pip where it builds the engine on a processor with these instruction sets,
        and is not held to one of ``ISAS``: none.

        :param instruction_sets: as Linux names them
        """
        return {}

    @abstractmethod
    def __init__(self, settings: EngineSettings) -> None:
        """Load the model."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Return the version of the engine's package."""

    @property
    def process_id(self) -> int:
        """Return the process that computes, whose memory and CPU time are the engine's: this one, unless it is a
        server's.
        """
        return os.getpid()

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        """Greedily generate exactly ``max_tokens`` tokens for each prompt, end tokens ignored, all at once.

        :raises UnsupportedError: it cannot batch requests
        """

    def event_loop_lag(self, prompts: Sequence[Prompt], max_tokens: int, interval: float) -> list[float]:
        """Return by how many seconds an application's timer fires late while the engine runs these prompts, per
        ``interval``.

        :raises UnsupportedError: it has no async API
        """
        raise UnsupportedError("no async API")

    def logits(self, token_ids: Sequence[int], path: LogitsPath) -> Any:
        """Return the logits after every token, a numpy array ``[len(token_ids), vocab_size]`` float32.

        :raises UnsupportedError: its API has no logits
        """
        raise UnsupportedError("its Python API returns no logits")
