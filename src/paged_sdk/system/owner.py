"""Know which process a model belongs to, and what it has started."""

from __future__ import annotations

import os
from typing import NoReturn

from paged_sdk.errors import ModelClosedError

__all__ = ["OfOneProcess", "Owner", "closed_model"]


class Owner:
    """Stands for the process that has built a model or started others: its threads and connections do not survive a
    fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Tell whether this is that process, and no forked child of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise in another process.

        :raises ModelClosedError: this is a forked child of the process that built the model
        """
        if not self.is_here:
            raise ModelClosedError(
                f"this model belongs to process {self._pid}; threads do not survive a fork: build a model in the child"
            )


class OfOneProcess:
    """Is a base of what can be neither copied nor pickled, because it stands for threads and memory of this process.

    A copy would be closed with the original, and to pickle fails at whatever comes first in it, with an error that
    names neither.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process, and can be neither copied nor pickled: threads and tasks "
            "share it, other processes need their own"
        )


def closed_model() -> ModelClosedError:
    """Make the error of a model that is closed."""
    return ModelClosedError("the model is closed: build another one")
