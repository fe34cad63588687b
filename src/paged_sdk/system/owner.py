"""Check that an object is used in the process that created it."""

from __future__ import annotations

import os
from typing import NoReturn

from paged_sdk.errors import ModelClosedError

__all__ = ["OfOneProcess", "Owner", "closed_model"]


class Owner:
    """Remembers the process that built a model or started other processes: threads and connections do not survive a
    fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Tell whether the current process is the owner, not a forked child."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise if the current process is not the owner.

        :raises ModelClosedError: this is a forked child of the process that built the model
        """
        if not self.is_here:
            raise ModelClosedError(
                f"this model belongs to process {self._pid}; threads do not survive a fork: build a model in the child"
            )


class OfOneProcess:
    """Prevents copying and pickling of subclasses, which refer to threads and memory of this process.

    A copy would be closed with the original. Pickling would fail at some attribute, with an error that does not name
    the object.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process, and can be neither copied nor pickled: threads and tasks "
            "share it, other processes need their own"
        )


def closed_model() -> ModelClosedError:
    """Return the error to raise if a model is closed."""
    return ModelClosedError("the model is closed: build another one")
