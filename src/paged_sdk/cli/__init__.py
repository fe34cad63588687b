"""Provide the command line, ``paged-sdk``."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import Final

__all__ = ["main"]

_INTERRUPTED: Final = 128 + signal.SIGINT
"""What a shell reports."""

_TERMINATED: Final = 128 + signal.SIGTERM

_NOT_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing to a file or terminal fails with that takes no more; a reader that goes is no error."""


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0; 1 for an error of this package; 2 for a command line that cannot be understood; 130 for Ctrl-C;
    143 for SIGTERM, where a command knows nothing better to do with it.
    """
    _prepare_streams()
    _tidy_up_when_told_to_end()
    try:
        from paged_sdk.cli.app import app

        app()
    except KeyboardInterrupt:  # before a command has begun, which knows it too
        sys.exit(_INTERRUPTED)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        sys.stderr.write(f"error: what is to be shown cannot be written: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # which takes what would be written in the end
        sys.exit(1)


def _tidy_up_when_told_to_end() -> None:
    """Have what would cut the process off end it as Ctrl-C does: files that are not whole are removed."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    hangup = getattr(signal, "SIGHUP", None)  # a terminal is closed; Windows has none, and nohup has it ignored
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_DFL)  # the second time at once
    sys.exit(_TERMINATED)


def _prepare_streams() -> None:
    """Make the standard streams ones that any text can be written to, and that only text is read from."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed when the program began, and its number is the lowest free one
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe in ASCII or cp1252 does not take every character
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():  # it lets bytes through in the C locale
        sys.stdin.reconfigure(errors="strict")
