"""Join a face to an engine of the same process by a link that carries nothing but bytes, as one between machines."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue

import anyio

from paged_sdk import Model
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.face import RemoteModel, pack_face, unpack_face
from paged_sdk.remote.host import EngineHost
from paged_sdk.remote.link import Parcel

__all__ = ["LoopbackLink", "remotely"]


class LoopbackLink:
    """Carries parcels on a thread of its own in each direction."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._to_host: SimpleQueue[Parcel | None] = SimpleQueue()
        self._to_face: SimpleQueue[Parcel | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def send(self, parcel: Parcel) -> None:
        self._to_host.put([bytearray(part) for part in parcel])

    def send_back(self, parcel: Parcel) -> None:
        self._to_face.put([bytearray(part) for part in parcel])

    def connect(self, host: EngineHost, engine: RemoteEngine) -> None:
        self._start(self._to_host, host.receive, lambda: None)
        self._start(self._to_face, engine.receive, lambda: engine.lost("it was cut"))

    def cut(self) -> None:
        """Carry nothing more."""
        self._to_host.put(None)
        self._to_face.put(None)

    def join(self, timeout: float | None = None) -> bool:
        self._threads[1].join(timeout)
        return not self._threads[1].is_alive()

    def _start(
        self, queue: SimpleQueue[Parcel | None], take: Callable[[Parcel], None], end: Callable[[], None]
    ) -> None:
        def run() -> None:
            while (parcel := queue.get()) is not None:
                take(parcel)
            end()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


@asynccontextmanager
async def remotely(model: Model) -> AsyncIterator[tuple[RemoteModel, LoopbackLink]]:
    """Give a model that has only the face of another one, and close both in the end."""
    link = LoopbackLink()
    face, preparer = unpack_face([bytearray(part) for part in pack_face(model._insides)])
    assert preparer is not None
    async with model, anyio.create_task_group() as tasks:
        host = EngineHost(model._insides, link.send_back)
        engine = RemoteEngine(link, name="replica 0 (here)", stats=face.stats, adapters=face.adapters)
        link.connect(host, engine)
        remote = RemoteModel(face, preparer, engine)

        async def serve() -> None:
            await host.serve()
            link.cut()

        tasks.start_soon(serve)
        try:
            yield remote, link
        finally:
            await remote.aclose()
            await model.aclose()
