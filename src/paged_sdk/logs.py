"""Provides the package's logger, which is silent until an application or ``with_logging()`` turns it on."""

from __future__ import annotations

import logging
import sys

_ROOT = "paged_sdk"


def get_logger(name: str) -> logging.Logger:
    """Return a module's logger, below the package's: ``get_logger(__name__)``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def show_logs() -> None:
    """Print the package's log lines to stderr, unless the application already handles them. Idempotent."""
    logger = logging.getLogger(_ROOT)
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


class _StderrHandler(logging.Handler):
    """Writes to the current ``sys.stderr``: tests and notebooks replace and close it, and a daemon has none."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or getattr(stream, "closed", False):
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # as in logging's own handlers
            self.handleError(record)
