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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
