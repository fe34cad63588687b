"""Define the protocol between the driver and the engines' processes: one JSON object per line.

The driver sends ``{"do": ..., ...}``; the engine's process answers each with ``{"result": ...}``,
``{"unsupported": reason}`` or ``{"failed": reason}``. Its first line reports that the model is loaded.

Engines run in separate environments, so this file and ``worker.py`` use only the standard library.
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
"""A GGUF file, or a directory with config.json, safetensors and tokenizer.json."""

LogitsPath = Literal["prefill", "decode"]
"""Logits of a text computed in chunks, or token by token."""


class UnsupportedError(Exception):
    """Raised if the engine's Python API does not support an operation; the message says why."""


@dataclass(frozen=True)
class EngineSettings:
    """Holds an engine's settings.

    :ivar model: a GGUF file or directory, according to the engine's ``FORMATS``
    :ivar num_threads: CPU threads
    :ivar max_model_len: tokens in a sequence, prompt and output together
    :ivar max_num_seqs: concurrent sequences
    :ivar dtype: dtype of a directory's weights and of the computation; None: the engine's choice
    :ivar lookup: maximum number of draft tokens per step by prompt lookup, if the engine has it; 0: off
    :ivar isa: instruction set that the engine is limited to, one of its ``ISAS``; None: the processor's best
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
    """Defines an engine's interface for the benchmark: the constructor loads the model, and one batch runs at a time.

    :cvar REQUIREMENTS: packages that pip installs into the engine's environment; empty: it runs in this project's
    :cvar UNWANTED: packages that are installed as their dependencies and removed again
    :cvar FORMATS: formats that the engine loads, the preferred one first
    :cvar ISAS: instruction sets that the engine can be limited to, with the environment variables that do it
    :cvar BUILT_FOR_ISA: whether these variables are for pip, which builds the engine for one instruction set, so that
        each needs an environment
    """

    REQUIREMENTS: ClassVar[tuple[str, ...]]
    UNWANTED: ClassVar[tuple[str, ...]] = ()
    FORMATS: ClassVar[tuple[Format, ...]] = ("gguf",)
    ISAS: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    BUILT_FOR_ISA: ClassVar[bool] = False

    @classmethod
    def build_variables(cls, instruction_sets: Collection[str]) -> Mapping[str, str]:
        """Return environment variables for pip to build the engine for this processor, without a limit to one of
        ``ISAS``. By default none.

        :param instruction_sets: the processor's instruction sets, as Linux names them
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
        """Return the id of the process that computes, whose memory and CPU time are measured: this process, unless the
        engine is a server.
        """
        return os.getpid()

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        """Greedily generate exactly ``max_tokens`` tokens for each prompt, ignoring end tokens, all concurrently.

        :raises UnsupportedError: the engine cannot batch requests
        """

    def event_loop_lag(self, prompts: Sequence[Prompt], max_tokens: int, interval: float) -> list[float]:
        """Return the delays, in seconds, of a timer of the application that fires every ``interval`` while the engine
        runs these prompts.

        :raises UnsupportedError: the engine has no async API
        """
        raise UnsupportedError("no async API")

    def logits(self, token_ids: Sequence[int], path: LogitsPath) -> Any:
        """Return the logits after every token, a numpy array ``[len(token_ids), vocab_size]`` float32.

        :raises UnsupportedError: the engine's API has no logits
        """
        raise UnsupportedError("its Python API returns no logits")
