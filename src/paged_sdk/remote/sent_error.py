"""Send exceptions to another process, with their types, attributes and causes."""

from __future__ import annotations

import pickle
from typing import Final

from attrs import frozen

from paged_sdk.errors import PagedError, shown

__all__ = ["SentError"]

_MOST_CAUSES: Final = 8


@frozen
class SentError:
    """Holds a serialized exception.

    :ivar text: type and message, for receivers that cannot unpickle the exception
    :ivar data: the pickled exception; None if it cannot be pickled
    :ivar cause: the exception's ``__cause__``
    """

    text: str
    data: bytes | None
    cause: SentError | None

    @classmethod
    def of(cls, error: BaseException, depth: int = 0) -> SentError:
        """Serialize an exception. Attributes of a :class:`PagedError` that cannot be pickled become text.

        :param depth: how many exceptions this one is the cause of; the chain is cut at 8
        """
        cause = error.__cause__
        return cls(
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            _pickled(error),
            None if cause is None or depth == _MOST_CAUSES else cls.of(cause, depth + 1),
        )

    def received(self) -> Exception:
        """Return the exception; a RuntimeError with the same text if it cannot be unpickled here."""
        error: object = None
        if self.data is not None:
            try:
                error = pickle.loads(self.data)
            except Exception:  # of any kind, from the exception's class
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
    """Pickle a value; None if that or unpickling fails, as if an exception class needs more than ``args``."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:  # of any kind, from methods of the value's class
        return None
    return data
