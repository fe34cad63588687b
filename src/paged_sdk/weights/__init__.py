"""Read weights from Hugging Face directories, GGUF files, the Hub and the embedded model.

``write_gguf`` is here by the name that users know it by; it needs tokenizers too, and lies where they are joined with
weights: see :func:`paged_sdk.build.export.gguf.write_gguf`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["write_gguf"]


def __getattr__(name: str) -> Any:
    if name == "write_gguf":
        return import_module("paged_sdk.build.export.gguf").write_gguf
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
