"""Read weights from Hugging Face directories, GGUF files, the Hub and the embedded model.

``write_gguf`` is exported here for users. It also needs tokenizers, so its implementation is on a higher floor:
:func:`paged_sdk.build.export.gguf.write_gguf`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["write_gguf"]


def __getattr__(name: str) -> Any:
    if name == "write_gguf":
        return import_module("paged_sdk.build.export.gguf").write_gguf
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
