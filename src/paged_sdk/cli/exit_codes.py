"""Defines the exit codes of commands that fail. An invalid command line has 2, as typer does."""

from __future__ import annotations

import signal
from typing import Final

__all__ = ["CANNOT_LISTEN", "FAILED", "INTERRUPTED", "TERMINATED"]

FAILED: Final = 1

CANNOT_LISTEN: Final = 2
"""As an invalid ``--host`` or ``--port``."""

INTERRUPTED: Final = 128 + signal.SIGINT
"""As shells report Ctrl-C."""

TERMINATED: Final = 128 + signal.SIGTERM
"""As shells report SIGTERM."""
