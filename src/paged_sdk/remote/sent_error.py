"""Carry exceptions to another process, with their types, attributes and causes."""

from __future__ import annotations

import pickle
from typing import Final

from attrs import frozen

from paged_sdk.errors import PagedError, shown

__all__ = ["SentError"]

_MOST_CAUSES: Final = 8


@frozen
class SentError:
    """Holds an exception as it can be sent.

    :ivar text: what it says, for where its class is not known
    :ivar data: the pickled exception; None: it cannot be
    :ivar cause: what it was raised from
    """

    text: str
    data: bytes | None
    cause: SentError | None

    @classmethod
    def of(cls, error: BaseException, depth: int = 0) -> SentError:
        """Take an exception to send. What of its attributes cannot be sent becomes text."""
        cause = error.__cause__
        return cls(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            _pickled(error),
            None if cause is None or depth == _MOST_CAUSES else cls.of(cause, depth + 1),
        )

    def received(self) -> Exception:
        """Return the exception; one of another type with the same text if its class is not known here."""
        error: object = None
        if self.data is not None:
            try:
                error = pickle.loads(self.data)
            except Exception:  # whatever a stranger's class raises
                error = None
        if not isinstance(error, Exception):
            error = RuntimeError(self.text)
        if self.cause is not None:
            error.__cause__ = self.cause.received()
        return error


def _pickled(error: BaseException) -> bytes | None:
    data = _tried(error)
    if data is None and isinstance(error, PagedError):
        plain = type(error)(*error.args)
        for name, value in vars(error).items():
            setattr(plain, name, value if _tried(value) is not None else shown(value))
        data = _tried(plain)
    return data


def _tried(value: object) -> bytes | None:
    """Pickle what can also be made of its pickle again: an exception's class may want more than its arguments."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:  # of any kind, from methods of a stranger's class
        return None
    return data
