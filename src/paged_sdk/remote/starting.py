"""Define the messages to and from a replica's process until its model is built."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TypeAlias

from attrs import frozen

from paged_sdk.remote.sent_error import SentError

__all__ = ["Assignment", "BeforeBuilt", "Built", "Failed", "LogLine"]


@frozen(kw_only=True)
class Assignment:
    """Tells a process what to build.

    :ivar builder: the pickled builder
    :ivar log_level: the level of the package's logger
    :ivar wants_preparer: whether to send back what prepares requests: tokenizer, chat template and so on
    :ivar processors: the processors to run on; None: any
    """

    builder: bytes
    log_level: int
    wants_preparer: bool
    processors: Collection[int] | None


@frozen
class LogLine:
    """Brings a log message."""

    logger: str
    level: int
    text: str

    @classmethod
    def of(cls, record: logging.LogRecord) -> LogLine:
        """Format a record, including its traceback if there is one."""
        return cls(record.name, record.levelno, logging.Formatter("%(message)s").format(record))


@frozen
class Built:
    """Says that the model is built; the rest of the parcel is its face."""


@frozen
class Failed:
    """Says that the model could not be built."""

    error: SentError


BeforeBuilt: TypeAlias = LogLine | Built | Failed
