"""Writes log lines as JSON, for log collectors."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

__all__ = ["JsonLines", "log_as_json"]


class JsonLines(logging.Formatter):
    """Formats every record as one line of JSON: time, level, logger, message, and the record's ``fields``, such as a
    request's tokens and times.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Write all log lines of the process to stderr as JSON: those of this package from level INFO on, all others from
    WARNING on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().addHandler(handler)
    logging.getLogger("paged_sdk").setLevel(logging.INFO)
