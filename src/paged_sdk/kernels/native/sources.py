"""Names the native library and hashes its sources, so that a library built from other sources is detected before use.

``setup.py`` runs this file by path when it builds the library, so it imports nothing from the package.
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
    """Return the architecture to compile for on macOS. A universal Python may target two, but the kernels are built for
    the instruction sets of one.

    :param arch_flags: ``ARCHFLAGS`` of the environment, such as "-arch arm64"
    :param host: this machine's architecture, returned if ``arch_flags`` names none or both
    """
    named = set(re.findall(r"-arch\s+(\S+)", arch_flags))
    return named.pop() if len(named) == 1 else host


def sources_hash(directory: Path = SOURCES) -> str:
    """Return the hash of the C++ sources, or an empty string if they are not installed."""
    files = sorted([*directory.glob("*.cpp"), *directory.glob("*.h")])
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\n{file.stat().st_size}\n".encode() + file.read_bytes())
    return found.hexdigest()[:32] if files else ""
