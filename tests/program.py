"""Run ``paged-sdk serve`` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["PROGRAM", "program"]

PROGRAM: Final = (sys.executable, "-c", "from paged_sdk.cli import main; main()", "serve")
FLAGS: Final = ("--dtype", "float32", "--num-threads", "1", "--pa-context-len", "4096", "--port", "0")


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server, and give the process and the address that it says. It is killed if it does not end."""
    started = subprocess.Popen([*PROGRAM, *FLAGS, *arguments], stderr=subprocess.PIPE, text=True)
    with started:
        try:
            assert started.stderr is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in started.stderr)
            yield started, next(address.group() for address in found if address is not None)
        finally:
            started.kill()
