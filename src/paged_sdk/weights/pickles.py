"""Recognize pickles, which are never loaded, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["PICKLE_IS_REFUSED", "find_pickle"]

PICKLE_IS_REFUSED: Final = (
    "a pickle, which can run any code when it is loaded and is refused: convert the model to safetensors "
    "(save_pretrained of transformers does), or use a version in safetensors or GGUF"
)
"""Continues an error's message after "is" or "has only"."""

_SUFFIXES: Final = (".bin", ".ckpt", ".pkl", ".pt", ".pth")


def find_pickle(names: Iterable[str]) -> str | None:
    """Return the first of these file names, in alphabetical order, that is one of a pickle; None if none is."""
    return min((name for name in names if name.endswith(_SUFFIXES)), default=None)
