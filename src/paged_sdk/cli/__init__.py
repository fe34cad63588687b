"""Provides the command line, ``paged-sdk``."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import Final

from paged_sdk.cli.exit_codes import FAILED, INTERRUPTED, TERMINATED

__all__ = ["main"]

_NOT_WRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing to a full or broken file or terminal. EPIPE is not among them: a reader may close its pipe."""


def main() -> None:
    """Run the command line and exit.

    Exit codes: 0; 1 for an error of this package; 2 for an invalid command line; 130 for Ctrl-C; 143 for SIGTERM,
    unless a command handles it.
    """
    _prepare_streams()
    _tidy_up_when_told_to_end()
    # Else Python goes through all that torch has imported several times as it ends: 0.9 of 3.5 s of a short answer.
    atexit.register(gc.freeze)
    try:
        from paged_sdk.cli.app import app

        app()
    except KeyboardInterrupt:  # before a command has begun; commands handle it themselves
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes the buffered output that is flushed at exit
        sys.exit(FAILED)


def _tidy_up_when_told_to_end() -> None:
    """Make SIGTERM and SIGHUP end the process by an exception, as Ctrl-C does, so that incomplete files are removed."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    hangup = getattr(signal, "SIGHUP", None)  # the terminal was closed; missing on Windows, ignored by nohup
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_DFL)  # a second signal kills at once
    sys.exit(TERMINATED)


def _prepare_streams() -> None:
    """Configure the standard streams so that any text can be written, and invalid input raises an error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed at start: otherwise the next opened file would get its descriptor
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # ASCII and cp1252 cannot encode every character
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():  # in the C locale, any bytes pass
        sys.stdin.reconfigure(errors="strict")
