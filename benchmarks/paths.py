"""Returns directories for downloads, peers' environments and results, which never go into the repository."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory(*parts: str) -> Path:
    """Return a directory of the benchmarks in the user's cache, which is created if missing."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root.joinpath("paged-sdk", "benchmarks", *parts)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
