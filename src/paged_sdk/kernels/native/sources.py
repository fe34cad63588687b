"""Names the native library and identifies its sources, so that one that was built from others is known before it is
called.

``setup.py`` runs this file by its path when it builds the library; so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

__all__ = ["SOURCES", "apple_machine", "library_name", "sources_hash"]

SOURCES: Final = Path(__file__).with_name("csrc")


def library_name(*, on_windows: bool) -> str:
    """Return the library's file name."""
    return "paged_kernels.dll" if on_windows else "libpaged_kernels.so"


def apple_machine(arch_flags: str, host: str) -> str:
    """Return which machine to compile for on macOS, where a Python may be one for two: instruction sets are one's.

    :param arch_flags: ``ARCHFLAGS`` of the environment, such as "-arch arm64"
    :param host: this machine, where that names none or both
    """
    named = set(re.findall(r"-arch\s+(\S+)", arch_flags))
    return named.pop() if len(named) == 1 else host


def sources_hash(directory: Path = SOURCES) -> str:
    """Return the hash of the C++ sources; empty where they are not installed."""
    files = sorted([*directory.glob("*.cpp"), *directory.glob("*.h")])
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\n{file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()[:32] if files else ""
