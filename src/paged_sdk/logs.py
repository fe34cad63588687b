"""Provides the package's logger, which is silent until an application or ``with_logging()`` turns it on."""

from __future__ import annotations

import logging
import sys

_ROOT = "paged_sdk"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, below the package's own: ``get_logger(__name__)``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def show_logs() -> None:
    """Print the package's log lines to stderr, unless the application already handles them. To call it again changes
    nothing.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


class _StderrHandler(logging.Handler):
    """Writes to what is stderr at the time: tests and notebooks put another one there and close it, and a daemon has
    none.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or getattr(stream, "closed", False):
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # of any kind, as logging's own handlers do
            self.handleError(record)
