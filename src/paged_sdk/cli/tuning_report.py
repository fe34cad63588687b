"""Holds the trials and suggestions of ``paged-sdk tune``, and formats them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from attrs import asdict, field, frozen

from paged_sdk import MachineReport
from paged_sdk.cli.groups import spellings_of_settings
from paged_sdk.cli.measuring import Measurement
from paged_sdk.cli.serve import serve
from paged_sdk.cli.tables import table

__all__ = ["Suggestion", "Trial", "Tuning", "command_line"]

CHAT_PROMPT, CHAT_ANSWER = 512, 128
"""Tokens of the prompt and the answer of the chat by whose duration settings are compared."""


@frozen(kw_only=True)
class Trial:
    """Holds the measurements of a model with some settings.

    :ivar isq: type that weights were quantized to while loading; None: not quantized
    :ivar weight_bytes: approximate size of the weights
    :ivar perplexity: perplexity of a short text
    :ivar prompt: prefill speed
    :ivar text: decode speed of concurrent texts
    """

    isq: str | None
    num_threads: int
    weight_bytes: int
    perplexity: float
    prompt: Measurement
    text: Measurement

    @property
    def chat_seconds(self) -> float:
        """Return the estimated seconds of concurrent chats, each with 512 prompt tokens and an answer of 128."""
        streams = self.text.streams
        return streams * (CHAT_PROMPT / self.prompt.median + CHAT_ANSWER / self.text.median)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as plain data."""
        return asdict(self, recurse=False) | {
            "prompt": self.prompt.to_dict(),
            "text": self.text.to_dict(),
            "chat_seconds": self.chat_seconds,
        }


@frozen(kw_only=True)
class Suggestion:
    """Suggests a value for an option.

    :ivar name: the option's name in Python
    :ivar why: the reason, for the user
    """

    name: str
    value: Any
    why: str


@frozen(kw_only=True)
class Tuning:
    """Holds all trials and suggestions.

    :ivar given: options that the user gave, by name
    :ivar types: a trial for each type of weights
    :ivar refused: reasons why types were not tried, by type
    :ivar threads: a trial for each number of threads, with the chosen type
    """

    model: str
    architecture: str
    machine: MachineReport
    streams: int
    context_len: int
    given: Mapping[str, Any] = field(hash=False)
    types: tuple[Trial, ...]
    refused: Mapping[str, str] = field(hash=False)
    threads: tuple[Trial, ...]
    suggestions: tuple[Suggestion, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the resulting options of ``serve`` by name: given and suggested."""
        return {**self.given, **{each.name: each.value for each in self.suggestions}}

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        return json.dumps(
            {
                "model": self.model,
                "architecture": self.architecture,
                "machine": self.machine.to_dict(),
                "streams": self.streams,
                "context_len": self.context_len,
                "types": [each.to_dict() for each in self.types],
                "refused": dict(self.refused),
                "threads": [each.to_dict() for each in self.threads],
                "suggestions": [
                    {"option": SPELLINGS[each.name], "value": _plain(each.value), "why": each.why}
                    for each in self.suggestions
                ],
                "command": command_line(self.settings),
            },
            indent=2,
        )

    def to_text(self) -> str:
        """Return everything as readable text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        machine = self.machine
        yield f"{self.model} ({self.architecture})"
        yield f"{machine.processor_name}, {machine.num_processors} usable, CPU kernels: {machine.kernels}"
        yield f"For {_texts(self.streams)} of {self.context_len} tokens at once."
        yield ""
        yield from table([_heading("weights"), *(_row(each.isq or "as they are", each) for each in self.types)])
        for name, why in self.refused.items():
            yield f"{name}: not tried, {why}"
        if len(self.threads) > 1:
            yield ""
            rows = sorted(self.threads, key=lambda each: each.num_threads)
            yield from table([_heading("threads"), *(_row(str(each.num_threads), each) for each in rows)])
        yield ""
        yield f"Speeds are tokens per second; a chat has {CHAT_PROMPT} tokens, and its answer {CHAT_ANSWER}."
        yield ""
        for each in self.suggestions:
            yield f"{SPELLINGS[each.name]} {_plain(each.value)}: {each.why}"
        yield ""
        yield command_line(self.settings)


SPELLINGS: Final[Mapping[str, str]] = spellings_of_settings(serve)


def command_line(settings: Mapping[str, Any]) -> str:
    """Return the command line of ``serve`` with these options.

    :param settings: values by names of options
    """
    words = ["paged-sdk", "serve"]
    for name, value in settings.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [SPELLINGS[name]] if each is True else [SPELLINGS[name], str(_plain(each))]
    return shlex.join(words)


def _plain(value: object) -> object:
    """Return a value in the form of a command line and of JSON."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _heading(name: str) -> Sequence[str]:
    return (name, "MiB", "perplexity", "prompt", "text", "chats")


def _row(name: str, trial: Trial) -> Sequence[str]:
    return (
        name,
        f"{trial.weight_bytes / 2**20:.0f}",
        f"{trial.perplexity:.2f}",
        f"{trial.prompt.median:.1f}",
        f"{trial.text.median:.1f}",
        f"{trial.chat_seconds:.1f} s",
    )


def _texts(streams: int) -> str:
    return "one text" if streams == 1 else f"{streams} texts"
