"""Track the replicas of a deployment as Ray Serve starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from paged_sdk.errors import EngineDeadError, PagedError
from paged_sdk.logs import get_logger
from paged_sdk.ray.adapters import FleetAdapters
from paged_sdk.ray.link import RayLink
from paged_sdk.ray.ray_loop import RayLoop
from paged_sdk.ray.watch import Watch
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.face import RemoteModel, unpack_face
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.messages import Ended
from paged_sdk.remote.packing import unpack
from paged_sdk.routing.replica_set import as_replica
from paged_sdk.routing.routed_worker import RoutedWorker

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["Fleet"]

_log = get_logger(__name__)

PAUSE_SECONDS: Final = 1.0
"""Pause before a broken link to a running replica is made again."""
CLOSE_SECONDS: Final = 30.0


@define(eq=False)
class _Member:
    """Holds a replica and the link to it.

    :ivar model: the client model of the replica, once it has described itself
    :ivar number: its number in the router; None: it gets no requests yet, or no more
    """

    link: RayLink | None = None
    model: RemoteModel | None = None
    number: int | None = None


class Fleet:
    """Keeps a link to each replica. Everything but the constructor runs in the loop.

    A replica that Ray Serve is going to end gets no more requests; Ray Serve waits for its running ones, and its link
    ends with the last of them. The link to a replica that dies ends at once.
    """

    def __init__(self, handle: DeploymentHandle, loop: RayLoop) -> None:
        self._handle = handle
        self._loop = loop
        self._names: frozenset[str] = frozenset()
        self._members: dict[str, _Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._present: tuple[RemoteModel, ...] = ()
        self._lost: set[str] = set()
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._traits: Mapping[str, object] | None = None
        self._routed: RoutedWorker | None = None
        self._adapters: FleetAdapters | None = None

    @property
    def models(self) -> tuple[RemoteModel, ...]:
        """Return the client models of the replicas that get requests; may be called from any thread."""
        return self._present

    # Until the model is open

    async def open(self) -> Mapping[str, RemoteModel]:
        """Make a link to each current replica, and return the client models by name.

        :raises EngineDeadError: no replica answers
        :raises Exception: the exception that building a replica raised
        """
        watch = Watch(lambda names: self._loop.call_soon(partial(self._follow, names)))
        await self._handle.watch.remote(watch)
        while True:
            models = {name: each.model for name, each in self._members.items() if each.model is not None}
            if self._failure is not None:
                raise self._failure
            waiting = self._names.difference(models, self._lost)
            if models and not waiting:
                self._present = tuple(models.values())
                self._traits = self._present[0].traits
                return models
            if self._lost and not waiting:
                raise EngineDeadError("the replicas have died: see Ray Serve's log")
            self._changed.clear()
            await self._changed.wait()

    def begin(self, routed: RoutedWorker, adapters: FleetAdapters, numbers: Mapping[str, int]) -> None:
        """Add later replicas to the router, and remove replicas that end, from now on.

        :param numbers: the router's number of each replica that it has, by name
        """
        self._routed, self._adapters = routed, adapters
        for name, number in numbers.items():
            member = self._members.get(name)
            if member is None or name not in self._names:
                routed.remove(number)
            else:
                member.number = number
        self._note_present()
        for name, member in self._members.items():
            if name not in numbers and member.model is not None:
                self._start(self._admit(name, member, member.model))

    # Afterwards

    def _follow(self, names: frozenset[str]) -> None:
        gone, self._names = self._names - names, names
        for name in names:
            if name not in self._members:
                self._members[name] = _Member()
                self._start(self._keep(name))
        for name in gone:
            member = self._members.get(name)
            if member is not None and member.link is not None:
                self._dismiss(member)
                self._start(member.link.finish(drain=True))

    async def _keep(self, name: str) -> None:
        """Keep a link to a replica while the deployment has one of that name."""
        while name in self._names:
            member = self._members[name] = _Member()
            member.link = RayLink(self._handle, name, self._loop, partial(self._meet, name, member))
            await member.link.run()
            self._dismiss(member)
            self._lost.add(name)
            self._changed.set()
            await asyncio.sleep(PAUSE_SECONDS)
        del self._members[name]

    def _meet(self, name: str, member: _Member, link: RayLink, parcel: Parcel) -> RemoteEngine:
        """Make the client model of a replica from its first parcel; return the receiver of all later ones.

        :raises Exception: the exception that building the replica raised
        """
        first = unpack(parcel)
        if isinstance(first, Ended) and first.error is not None:
            self._failure = first.error.received()
            raise self._failure
        face, preparer = unpack_face(parcel)
        assert preparer is not None
        engine = RemoteEngine(link, name=f"replica {name}", stats=face.stats, adapters=face.adapters)
        member.model = RemoteModel(face, preparer, engine)
        self._changed.set()
        if self._routed is not None:
            self._start(self._admit(name, member, member.model))
        return engine

    async def _admit(self, name: str, member: _Member, model: RemoteModel) -> None:
        """Add a replica to the router, if it has the same model as the others."""
        assert self._routed is not None
        assert self._adapters is not None
        replica = as_replica(model)
        if model.traits != self._traits:
            _log.error("replica %s is of another model, and gets no requests", name)
            return
        try:
            await self._adapters.bring(replica)
            if name in self._names:
                member.number = self._routed.add(replica)
                self._note_present()
            await self._adapters.bring(replica)  # adapters that were loaded meanwhile
        except PagedError:
            _log.exception("replica %s gets no requests", name)

    def _dismiss(self, member: _Member) -> None:
        if member.number is not None and self._routed is not None:
            self._routed.remove(member.number)
        member.number = None
        self._note_present()

    def _note_present(self) -> None:
        every = self._members.values()
        self._present = tuple(each.model for each in every if each.model is not None and each.number is not None)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, *, drain: bool) -> None:
        """End all links; with ``drain``, each with its last request."""
        self._names = frozenset()
        seconds = None if drain else CLOSE_SECONDS
        links = [each.link for each in self._members.values() if each.link is not None]
        await asyncio.gather(*(link.finish(drain=drain, seconds=seconds) for link in links))
