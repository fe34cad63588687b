"""Serve the clients of one engine, one session per client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from paged_sdk.model_insides import ModelInsides
from paged_sdk.ray.outgoing import Outgoing
from paged_sdk.remote.face import pack_face
from paged_sdk.remote.host import EngineHost
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.messages import Close, Ended
from paged_sdk.remote.packing import pack
from paged_sdk.remote.sent_error import SentError

__all__ = ["NoSessions", "Sessions"]

SILENT_SECONDS: Final = 60.0
"""A client that sends nothing for this long is considered gone, and its requests end: it sends something every ten
seconds."""


class Sessions:
    """Holds a replica's sessions, in one event loop.

    :param name: the replica's name
    """

    def __init__(self, name: str, insides: ModelInsides, *, silent_seconds: float = SILENT_SECONDS) -> None:
        self._name = name
        self._insides = insides
        self._silent_seconds = silent_seconds
        self._sessions: dict[str, _Session] = {}
        self._has_failed = False

    async def listen(self, session_id: str, target: str) -> AsyncGenerator[list[Parcel]]:
        """Open a session and yield its parcels in lists, first the model's description, until the session ends. It ends
        at once if ``target`` names another replica, or if this one has failed.
        """
        if target != self._name or self._has_failed:
            return
        self._sessions[session_id] = session = _Session(self._insides)
        try:
            async with aclosing(session.run()) as said:
                async for parcels in said:
                    yield parcels
        finally:
            del self._sessions[session_id]
            session.close()

    def take(self, session_id: str, parcels: list[Parcel]) -> None:
        """Receive parcels of a session; ignored if the session has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.take(parcels)

    def fail(self, error: Exception) -> None:
        """Tell every client that the engine has failed, without using the engine, and open no more sessions."""
        self._has_failed = True
        for session in self._sessions.values():
            session.fail(error)

    def end_silent(self) -> None:
        """End the sessions of clients that are gone."""
        for session in self._sessions.values():
            if session.silent_seconds > self._silent_seconds:
                session.close()


class NoSessions:
    """Replaces the sessions of a replica whose model could not be built, and sends the exception to every client."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._was_said = False

    async def listen(self, session_id: str, target: str) -> AsyncGenerator[list[Parcel]]:
        self._was_said = True
        yield [pack(Ended(SentError.of(self._error)))]

    def take(self, session_id: str, parcels: list[Parcel]) -> None:
        """Do nothing: there are no sessions."""

    def end_silent(self) -> None:
        """Raise the exception once a client has received it: the health check then fails, and Ray Serve ends the
        replica.

        :raises Exception: the exception from building the model
        """
        if self._was_said:
            raise self._error


class _Session:
    """Serves one client."""

    def __init__(self, insides: ModelInsides) -> None:
        self._insides = insides
        self._outgoing = Outgoing()
        self._host = EngineHost(insides, self._outgoing.put, owns_engine=False)
        self._heard_at = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Return the time since the client last sent something."""
        return time.monotonic() - self._heard_at

    async def run(self) -> AsyncGenerator[list[Parcel]]:
        """Yield the model's description, and then the requests' output, until the session ends."""
        serving = asyncio.ensure_future(self._host.serve())
        serving.add_done_callback(lambda _: self._outgoing.end())
        try:
            yield [[bytes(part) for part in pack_face(self._insides)]]
            async with aclosing(self._outgoing.parcels()) as sent:
                async for parcels in sent:
                    yield parcels
        finally:
            serving.cancel()

    def take(self, parcels: list[Parcel]) -> None:
        self._heard_at = time.monotonic()
        for parcel in parcels:
            self._host.receive(parcel)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._outgoing.end_with(pack(Ended(SentError.of(error))))

    def close(self) -> None:
        """End the remaining requests: their output has no reader."""
        self._outgoing.close()
        self._host.receive(pack(Close(drain=False)))
