"""Define what a process of a replica is told at its start, and what it says until its model is built."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TypeAlias

from attrs import frozen

from paged_sdk.remote.sent_error import SentError

__all__ = ["Assignment", "BeforeBuilt", "Built", "Failed", "LogLine"]


@frozen(kw_only=True)
class Assignment:
    """Says what a process is to build.

    :ivar builder: the pickled builder
    :ivar log_level: of the package's logger
    :ivar wants_preparer: whether the model's tokenizer and all else that requests are prepared by is to be sent
    :ivar processors: those that it runs on; None: any
    """

    builder: bytes
    log_level: int
    wants_preparer: bool
    processors: Collection[int] | None


@frozen
class LogLine:
    """Brings a line of the log."""

    logger: str
    level: int
    text: str

    @classmethod
    def of(cls, record: logging.LogRecord) -> LogLine:
        """Take a record, with the traceback that it may have."""
        return cls(record.name, record.levelno, logging.Formatter("%(message)s").format(record))


@frozen
class Built:
    """Says that the model is built; its face is the rest of the parcel."""


@frozen
class Failed:
    """Says that the model could not be built."""

    error: SentError


BeforeBuilt: TypeAlias = LogLine | Built | Failed
