"""Keep requests while there is no replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from paged_sdk.errors import EngineDeadError, QueueFullError
from paged_sdk.scheduler.request import Request

__all__ = ["Guest", "WaitingRoom"]


class Guest(Protocol):
    """Waits for a replica."""

    @property
    def request(self) -> Request: ...

    def fail_soon(self, error: Exception) -> None:
        """End it with an error, from any thread."""
        ...


GuestT = TypeVar("GuestT", bound=Guest)


class WaitingRoom(Generic[GuestT]):
    """Keeps the requests that come while there is no replica, or whose last one has died, until another comes.

    An absence is limited: once it has lasted that long, those that wait end with an error, and nobody may wait until
    there has been a replica again.

    Whoever calls :meth:`begin`, :meth:`put` and :meth:`leave` holds one lock, the same for all. The other methods need
    none, so that finalizers may call them.

    :param seconds: how long an absence may last; 0: nobody waits
    :param limit: how many may wait
    :param call_later: has a function called after so many seconds, from any thread
    """

    def __init__(
        self, seconds: float, call_later: Callable[[float, Callable[[], object]], object], *, limit: int
    ) -> None:
        self._seconds = seconds
        self._limit = limit
        self._call_later = call_later
        self._waiting: dict[str, GuestT] = {}
        self._num_absences = 0
        self._is_absence = False
        self._is_over = not seconds

    @property
    def is_open(self) -> bool:
        """Tell whether requests may wait."""
        return not self._is_over

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        """Take it that there is no replica any more. A second call does nothing."""
        if self._is_absence or self._is_over:
            return
        self._is_absence = True
        number = self._num_absences
        self._call_later(self._seconds, lambda: self._give_up(number))

    def put(self, guest: GuestT) -> bool:
        """Have a request wait; False if it may not.

        :raises QueueFullError: as many as may wait do
        """
        self.begin()
        if len(self) >= self._limit:
            raise QueueFullError(
                f"no replica is running, and {self._limit} requests wait for one already",
                request_id=guest.request.request_id,
                limit=self._limit,
            )
        self._waiting[guest.request.request_id] = guest
        # Asked last: what is over by then has not heard of it, maybe.
        return self.is_open or not self.discard(guest.request.request_id)

    def leave(self) -> Iterable[GuestT]:
        """Take it that there is a replica again; return those that have waited."""
        self._is_absence = False
        self._is_over = not self._seconds
        self._num_absences += 1
        return self.empty()

    def discard(self, request_id: str) -> bool:
        """Know a request no more; False if it does not wait."""
        return self._waiting.pop(request_id, None) is not None

    def empty(self) -> Iterable[GuestT]:
        """Return those that have waited, which wait no more."""
        # One by one out of the same dict: whoever is put into it meanwhile is among them, or still there.
        waited: list[GuestT] = []
        with suppress(KeyError):  # it is empty
            while True:
                waited.append(self._waiting.popitem()[1])
        return reversed(waited)

    def _give_up(self, number: int) -> None:
        if number != self._num_absences:  # a replica has come meanwhile
            return
        self._is_over = True
        for guest in self.empty():
            guest.fail_soon(EngineDeadError(f"no replica is running, and none has come within {self._seconds:g} s"))
