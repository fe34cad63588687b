"""Keep requests while there is no replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from attrs import define, field

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
        self._absence = _Absence[GuestT](is_over=not seconds)

    @property
    def is_open(self) -> bool:
        """Tell whether requests may wait."""
        return not self._absence.is_over

    def __len__(self) -> int:
        return len(self._absence.waiting)

    def begin(self) -> None:
        """Take it that there is no replica any more. A second call does nothing."""
        absence = self._absence
        if absence.has_begun or absence.is_over:
            return
        absence.has_begun = True
        self._call_later(self._seconds, lambda: self._give_up(absence))

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
        self._absence.waiting[guest.request.request_id] = guest
        # Asked last: what is over by then has not heard of it, maybe.
        return self.is_open or not self.discard(guest.request.request_id)

    def leave(self) -> Iterable[GuestT]:
        """Take it that there is a replica again; return those that have waited."""
        ended, self._absence = self._absence, _Absence(is_over=not self._seconds)
        return ended.empty()

    def discard(self, request_id: str) -> bool:
        """Know a request no more; False if it does not wait."""
        return self._absence.waiting.pop(request_id, None) is not None

    def empty(self) -> Iterable[GuestT]:
        """Return those that have waited, which wait no more."""
        return self._absence.empty()

    def _give_up(self, absence: _Absence[GuestT]) -> None:
        # Where a replica has come meanwhile, nobody looks at this absence any more, and nobody waits in it.
        absence.is_over = True
        for guest in absence.empty():
            guest.fail_soon(EngineDeadError(f"no replica is running, and none has come within {self._seconds:g} s"))


@define(eq=False)
class _Absence(Generic[GuestT]):
    """Is the time from one replica to the next.

    :ivar is_over: it has lasted too long: nobody may wait any more
    :ivar has_begun: there is no replica
    :ivar waiting: requests by their ids
    """

    is_over: bool
    has_begun: bool = False
    waiting: dict[str, GuestT] = field(factory=dict)

    def empty(self) -> Iterable[GuestT]:
        # One by one out of the same dict: whoever is put into it meanwhile is among them, or still there.
        waited: list[GuestT] = []
        with suppress(KeyError):  # it is empty
            while True:
                waited.append(self.waiting.popitem()[1])
        return reversed(waited)
