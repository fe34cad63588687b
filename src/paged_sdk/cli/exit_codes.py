"""Defines the exit codes of commands that fail."""

from __future__ import annotations

import signal
from typing import Final

__all__ = ["CANNOT_LISTEN", "FAILED", "INTERRUPTED", "INVALID", "TERMINATED"]

FAILED: Final = 1

INVALID: Final = 2
"""An invalid command line, as typer has it."""

CANNOT_LISTEN: Final = INVALID
"""As an invalid ``--host`` or ``--port``."""

INTERRUPTED: Final = 128 + signal.SIGINT
"""As shells report Ctrl-C."""

TERMINATED: Final = 128 + signal.SIGTERM
"""As shells report SIGTERM."""
