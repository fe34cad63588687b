"""Carry messages between a client and one replica under Ray Serve."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from paged_sdk.logs import get_logger
from paged_sdk.ray.ray_loop import RayLoop
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.messages import Close
from paged_sdk.remote.packing import pack

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

__all__ = ["RayLink"]

_log = get_logger(__name__)

SIGN_SECONDS: Final = 10.0
"""Interval at which a client shows that it is alive, if it sends nothing else."""
WORD_SECONDS: Final = 1.0
"""Time for a replica to report that a session has ended. Ray Serve may no longer pass calls to it."""


class RayLink:
    """Carries parcels to a replica and back (a :class:`~paged_sdk.remote.link.Link`), by two Ray Serve calls.

    One call streams the output of all requests, because an item of a stream costs 0.4 ms whatever its size. The other
    is repeated to send: parcels that arrive during one call go with the next, in order.

    :param handle: the deployment's handle
    :param target: the replica's name
    :param make_engine: takes the first parcel, which describes the model, and returns the receiver of the others
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        target: str,
        loop: RayLoop,
        make_engine: Callable[[RayLink, Parcel], RemoteEngine],
    ) -> None:
        self._handle = handle
        self._target = target
        self._loop = loop
        self._make_engine = make_engine
        self._session = uuid.uuid4().hex
        self._outgoing: deque[list[bytes]] = deque()
        self._news = asyncio.Event()
        self._engine: RemoteEngine | None = None
        self._reason = "the link has ended"
        self._has_ended = threading.Event()
        self._ended = asyncio.Event()
        self._stream: DeploymentResponseGenerator | None = None

    def send(self, parcel: Parcel) -> None:
        copied = [bytes(part) for part in parcel]
        self._loop.call_soon(partial(self._put, copied))

    def join(self, timeout: float | None = None) -> bool:
        if not self._loop.is_current:  # the garbage collector may run a model's finalizer on any thread
            self._has_ended.wait(timeout)
        return self._has_ended.is_set()

    # In the loop

    async def run(self) -> None:
        """Carry parcels until the session ends or the replica dies; to be called once."""
        stream = self._handle.options(stream=True).listen.remote(self._session, target=self._target)
        self._stream = stream
        sending = asyncio.ensure_future(self._send_all(stream))
        try:
            async for parcels in stream:
                for parcel in parcels:
                    if self._engine is None:
                        self._engine = self._make_engine(self, parcel)
                    else:
                        self._engine.receive(parcel)
        except Exception as error:  # of any type: Ray also passes on the replica's exceptions
            said = str(error).strip().splitlines()
            self._reason = said[0] if said else type(error).__name__
            _log.info("the link to replica %s has ended: %s", self._target, self._reason)
        finally:
            sending.cancel()
            stream.cancel()
            if self._engine is not None:
                self._engine.lost(self._reason)
            self._has_ended.set()
            self._ended.set()

    async def finish(self, *, drain: bool, seconds: float | None = None) -> None:
        """End the session with its last request. Without ``drain``, the requests are asked to end now.

        :param seconds: end the session after this time in any case
        """
        self.send(pack(Close(drain)))
        begun = time.monotonic()
        while not await self._has_ended_within(WORD_SECONDS):  # ended by the replica, if Close has reached it
            if self._engine is None or self._engine.is_idle or (seconds and time.monotonic() - begun > seconds):
                if self._engine is not None:
                    self._engine.close()
                if self._stream is not None:
                    self._stream.cancel()
                await self._ended.wait()

    async def _has_ended_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def _put(self, parcel: list[bytes]) -> None:
        self._outgoing.append(parcel)
        self._news.set()

    async def _send_all(self, stream: DeploymentResponseGenerator) -> None:
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_SECONDS):
                        await self._news.wait()
                self._news.clear()
                parcels = list(self._outgoing)
                self._outgoing.clear()
                await self._handle.take.remote(self._session, parcels, target=self._target)
        except Exception as error:  # of any type; usually the stream fails too
            _log.info("nothing can be sent to replica %s: %r", self._target, error)
            stream.cancel()
