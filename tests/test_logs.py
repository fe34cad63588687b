"""Log lines that are asked for go to stderr, whatever is there at the time."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from paged_sdk.logs import get_logger, show_logs


@contextmanager
def stderr(stream: TextIO | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return a logger of the package, whose lines go no further."""
    package = logging.getLogger("paged_sdk")
    monkeypatch.setattr(package, "propagate", False)
    return package


def test_they_follow_stderr(logger: logging.Logger) -> None:
    logger.handlers.clear()  # pytest's own among them
    for line in ("One.", "Two."):
        with io.StringIO() as stream, stderr(stream):
            show_logs()
            get_logger("test").info(line)
            assert stream.getvalue().endswith(f"INFO paged_sdk.test: {line}\n")
            assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_where_nobody_hears_them_nobody_is_troubled(logger: logging.Logger, is_there: bool) -> None:
    logger.handlers.clear()
    closed = io.StringIO()
    closed.close()
    with stderr(closed if is_there else None):
        show_logs()
        get_logger("test").info("Unheard.")
