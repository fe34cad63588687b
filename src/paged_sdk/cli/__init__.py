"""Provide the command line, ``paged-sdk``."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0; 1 for an error of this package; 2 for a command line that cannot be understood; 130 for Ctrl-C.
    """
    from paged_sdk.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe in ASCII or cp1252 does not take every character
            stream.reconfigure(errors="backslashreplace")
    app()
