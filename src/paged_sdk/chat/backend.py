"""Bound how much a tokenizer of the tokenizers package may expand a text, and give the package's exceptions a type.

A tokenizer.json is a small untrusted program: its normalizer rewrites text and its regular expressions search it. The
package raises bare exceptions, or a panic that is not even an :class:`Exception`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import tokenizers

from paged_sdk.errors import PagedError

__all__ = ["MAX_GROWTH", "TOKEN_FLAGS", "failing_as", "growth_of"]

MAX_GROWTH: Final = 10_000.0
"""How many times longer a normalizer may make a text. For comparison: SentencePiece's space has 3 bytes, Unicode's
longest compatibility decomposition 18 characters."""

TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The settings of an added token of the tokenizers package, besides its text."""

# Upper bounds of output characters per input character.
_UNICODE_GROWTH: Final = {
    "NFC": 3.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Lowercase": 3.0, "BertNormalizer": 4.0, "StripAccents": 1.0,
    "Strip": 1.0, "Nmt": 1.0, "ByteLevel": 2.0,
}  # fmt: skip


@contextmanager
def failing_as(error: Callable[[str], PagedError]) -> Iterator[None]:
    """Convert exceptions and panics of the tokenizers package in the block.

    :param error: makes the error to raise instead, from the package's message
    """
    try:
        yield
    except PagedError:
        raise
    except Exception as exc:  # the package raises bare Exception
        raise error(str(exc)[:300]) from exc
    except BaseException as exc:
        if type(exc).__module__ != "pyo3_runtime":  # a KeyboardInterrupt, not a panic of the package
            raise
        raise error(str(exc)[:300]) from exc


def growth_of(backend: tokenizers.Tokenizer) -> float:
    """Return how many times longer the backend's normalizer may make a text, in characters. Text that is added once,
    such as a prefix, is counted as if the text had one character.
    """
    return 1.0 if backend.normalizer is None else _growth(json.loads(backend.normalizer.__getstate__()))


def _growth(step: Any) -> float:
    match step:
        case {"type": "Sequence", "normalizers": [*steps]}:
            growth = 1.0
            for each in steps:
                growth = min(growth * _growth(each), 1e30)
            return growth
        case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)}:
            return max(1.0, len(content) / max(1, len(found)))
        case {"type": "Replace", "content": str(content)}:
            return 1.0 + len(content)  # a match may have one character, or none
        case {"type": "Prepend", "prepend": str(prefix)}:
            return 1.0 + len(prefix)
        case {"type": "Precompiled", "precompiled_charsmap": str(map_)}:
            return _growth_of_map(map_)
        case {"type": str(name)}:
            return _UNICODE_GROWTH.get(name, 1.0)
        case _:
            return 1.0


def _growth_of_map(encoded: str) -> float:
    """Return the length of the longest replacement in SentencePiece's character map. The map is the size of a table in
    4 bytes, the table, and the replacements, each ended by a zero byte.
    """
    data = base64.b64decode(encoded)
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1.0, *map(len, replacements.split(b"\0")))
