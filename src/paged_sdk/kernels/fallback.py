"""Says once in the log why an op runs on torch's operations."""

from __future__ import annotations

from functools import cache

from paged_sdk.logs import get_logger

__all__ = ["log_fallback"]

_log = get_logger(__name__)


@cache
def log_fallback(op: str, reason: str) -> None:
    """Log that an op is served by torch, the first time that it is so for this reason."""
    _log.info("%s runs on torch operations: %s", op, reason)
