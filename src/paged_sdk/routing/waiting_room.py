"""Holds requests while there is no replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from paged_sdk.errors import EngineDeadError, QueueFullError
from paged_sdk.scheduler.request import Request

__all__ = ["WaitingRequest", "WaitingRoom"]


class WaitingRequest(Protocol):
    """Describes a request that waits for a replica."""

    @property
    def request(self) -> Request: ...

    def fail_soon(self, error: Exception) -> None:
        """End the request with an error. May be called from any thread."""
        ...


WaitingT = TypeVar("WaitingT", bound=WaitingRequest)


class WaitingRoom(Generic[WaitingT]):
    """Holds requests that arrive while there is no replica, or whose last replica has died, until another one is added.

    The absence of replicas has a time limit. When it is exceeded, the waiting requests end with an error, and no
    request may wait until there has been a replica again.

    Callers of :meth:`begin`, :meth:`put` and :meth:`leave` must hold one common lock. The other methods need no lock,
    so finalizers may call them.

    :param seconds: how long replicas may be absent; 0: no request waits
    :param limit: maximum number of waiting requests
    :param call_later: schedules a function after a number of seconds; may be called from any thread
    """

    def __init__(
        self, seconds: float, call_later: Callable[[float, Callable[[], object]], object], *, limit: int
    ) -> None:
        self._seconds = seconds
        self._limit = limit
        self._call_later = call_later
        self._absence = _Absence[WaitingT](is_over=not seconds)

    @property
    def is_open(self) -> bool:
        """Tell whether requests may wait."""
        return not self._absence.is_over

    def __len__(self) -> int:
        return len(self._absence.waiting)

    def begin(self) -> None:
        """Start the time limit, since there is no replica. Idempotent."""
        absence = self._absence
        if absence.has_begun or absence.is_over:
            return
        absence.has_begun = True
        self._call_later(self._seconds, lambda: self._give_up(absence))

    def put(self, waiting: WaitingT) -> bool:
        """Add a request; return False if none may wait any more.

        :raises QueueFullError: ``limit`` requests are waiting
        """
        self.begin()
        if len(self) >= self._limit:
            raise QueueFullError(
                f"no replica is running, and {self._limit} requests wait for one already",
                request_id=waiting.request.request_id,
                limit=self._limit,
            )
        self._absence.waiting[waiting.request.request_id] = waiting
        # Check after adding: if the time limit expired meanwhile, _give_up may have missed this request.
        return self.is_open or not self.discard(waiting.request.request_id)

    def leave(self) -> Iterable[WaitingT]:
        """End the absence, since there is a replica, and return the waiting requests."""
        ended, self._absence = self._absence, _Absence(is_over=not self._seconds)
        return ended.empty()

    def discard(self, request_id: str) -> bool:
        """Remove a request; return False if it was not waiting."""
        return self._absence.waiting.pop(request_id, None) is not None

    def empty(self) -> Iterable[WaitingT]:
        """Remove and return all waiting requests."""
        return self._absence.empty()

    def _give_up(self, absence: _Absence[WaitingT]) -> None:
        # If a replica has been added meanwhile, this absence has been replaced and is empty.
        absence.is_over = True
        for waiting in absence.empty():
            waiting.fail_soon(EngineDeadError(f"no replica is running, and none has come within {self._seconds:g} s"))


@define(eq=False)
class _Absence(Generic[WaitingT]):
    """Holds the state of one absence of replicas.

    :ivar is_over: whether the time limit is exceeded, so that no request may wait
    :ivar has_begun: whether the time limit is running, because there is no replica
    :ivar waiting: waiting requests by id
    """

    is_over: bool
    has_begun: bool = False
    waiting: dict[str, WaitingT] = field(factory=dict)

    def empty(self) -> Iterable[WaitingT]:
        # Pop one by one instead of replacing the dict: a request added meanwhile is returned, or stays in the dict.
        waited: list[WaitingT] = []
        with suppress(KeyError):  # the dict is empty
            while True:
                waited.append(self.waiting.popitem()[1])
        return reversed(waited)
