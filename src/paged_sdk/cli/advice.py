"""Says errors of the Python API in the words of a command: where one names a setting, by the option that sets it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from paged_sdk import ContextLengthError, PagedError, RequestError

__all__ = ["SAID_OTHERWISE", "in_options", "told"]


@frozen
class Phrase:
    """Describes a phrase about Python.

    :ivar option: the name of the option that does the same
    :ivar pattern: a regular expression that finds the phrase
    :ivar instead: what a command line has; ``{}`` is the option, groups are the pattern's
    """

    option: str
    pattern: str
    instead: str


SAID_OTHERWISE: Final = (
    Phrase("pa_context_len", r"(?:MemoryGpuConfig\.)?ContextSize\((?:tokens=)?(\d+)\)", r"{} \1"),
    Phrase("pa_memory_mb", r"(?:MemoryGpuConfig\.)?\bMB\((?:megabytes=)?(\d+)\)", r"{} \1"),
    Phrase("pa_memory_fraction", r"(?:MemoryGpuConfig\.)?Fraction\((?:fraction=)?([\d.e-]+)\)", r"{} \1"),
    Phrase("pa_cache_type", r"PagedCacheType\.(\w+)", r"{} \1"),
    Phrase("format", r"TextModelBuilder loads", "{} plain loads"),
    Phrase("raw", r"send_completion_request", "{}"),
)
"""Phrases beside names of builders' methods, which are found by the settings that options are marked with."""

METHOD: Final = r"(?:\w+\(\.\.\.\)\.)?\b(with_\w+)(?:\([^()]*\))?"
IS_ABOUT_PYTHON: Final = re.compile(r"\bwith_\w+|\b[A-Z]\w+Builder\b|\bsend_\w+|\w=True\b")


def in_options(text: str, spellings: Mapping[str, str]) -> str:
    """Return a text with options where it names what sets the same in Python.

    :param spellings: of a command's options, by names of their settings
        (:func:`~paged_sdk.cli.groups.spellings_of_settings`)
    """
    text = re.sub(rf"{METHOD} \((--[\w-]+)\)", r"\2", text)  # it says both
    text = re.sub(METHOD, lambda found: spellings.get(found[1], found[0]), text)
    for phrase in SAID_OTHERWISE:
        if phrase.option in spellings:
            text = re.sub(phrase.pattern, phrase.instead.format(spellings[phrase.option]), text)
    return text


def told(error: PagedError, spellings: Mapping[str, str]) -> str:
    """Return what to tell of an error on a command line. What only programs can do about it is left out.

    :param spellings: as for :func:`in_options`
    """
    match error:
        case ContextLengthError():
            return f"{error.problem}: shorten it"
        case RequestError():
            advice = in_options(error.advice, spellings)
            return f"{error.problem}: {advice}" if advice and not IS_ABOUT_PYTHON.search(advice) else error.problem
    return in_options(str(error), spellings)
