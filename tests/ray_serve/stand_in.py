"""Stand in for Ray Serve where it is not installed: calls reach the sessions of models in this process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from paged_sdk import Model
from paged_sdk.ray.fleet import Fleet
from paged_sdk.ray.ray_loop import RayLoop
from paged_sdk.ray.replicas import RayModel, in_loop
from paged_sdk.ray.sessions import NoSessions, Sessions
from paged_sdk.ray.watch import Watch

__all__ = ["StandIn", "connected", "opened"]


class StandIn:
    """Is a deployment and a handle of it.

    :ivar links: how often each replica was asked for a link
    """

    def __init__(self, models: Mapping[str, Model], *, silent_seconds: float = 60.0) -> None:
        self.loop = RayLoop()
        self.links: dict[str, int] = {}
        self._silent_seconds = silent_seconds
        self._watches: list[Watch] = []
        self._replicas: dict[str, Sessions | NoSessions] = {}
        self._listed: set[str] = set()
        self._streams: dict[str, list[_Stream]] = {}
        for name, model in models.items():
            self._put(name, model)

    # What Ray Serve does

    def start(self, name: str, model: Model) -> None:
        """Have one more replica."""
        self._put(name, model)
        self._tell()

    def start_in_vain(self, name: str, error: Exception) -> None:
        """Have one more replica, whose model cannot be built."""
        self._replicas[name] = NoSessions(error)
        self._listed.add(name)

    def retire(self, name: str) -> None:
        """Send a replica no more calls; those under way go on."""
        self._listed.discard(name)
        self._tell()

    def list_only(self, name: str) -> None:
        """Have a router know one replica alone, be it there or not."""
        self._listed = {name}

    def kill(self, name: str) -> None:
        """End a replica's process."""
        self._listed.discard(name)
        del self._replicas[name]
        for stream in self._streams.pop(name, []):
            self.loop.call_soon(stream.die)

    def _put(self, name: str, model: Model) -> None:
        self._replicas[name] = Sessions(name, model._insides, silent_seconds=self._silent_seconds)
        self._listed.add(name)

    def _tell(self) -> None:
        for watch in self._watches:
            watch.note(frozenset(self._listed))

    def sessions(self, name: str) -> Sessions | NoSessions:
        return self._replicas[name]

    # What a handle has

    def options(self, *, stream: bool) -> StandIn:
        return self

    @property
    def watch(self) -> _Method:
        async def watch(watch: Watch) -> None:
            pickle.loads(pickle.dumps(watch)).note(frozenset())  # a replica gets one that tells nobody
            self._watches.append(watch)
            self._tell()

        return _Method(watch)

    @property
    def listen(self) -> _Method:
        def listen(session: str, target: str) -> _Stream:
            self.links[target] = self.links.get(target, 0) + 1
            replica = self._replicas.get(target) or next(iter(self._replicas.values()))
            stream = _Stream(replica.listen(session, target))
            self._streams.setdefault(target, []).append(stream)
            return stream

        return _Method(listen)

    @property
    def take(self) -> _Method:
        async def take(session: str, parcels: list[Any], target: str) -> None:
            sent = pickle.loads(pickle.dumps(parcels))
            await asyncio.sleep(0)
            if target not in self._replicas:
                raise OSError("the actor has died")
            self._replicas[target].take(session, sent)

        return _Method(take)


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class _Stream:
    """Is a call that streams."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self._task: asyncio.Task[Any] | None = None
        self._is_dead = False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Any:
        if self._is_dead:
            raise OSError("The actor died.\nIts log has more.")
        self._task = asyncio.ensure_future(anext(self._items))
        try:
            return pickle.loads(pickle.dumps(await self._task))
        except asyncio.CancelledError:
            if self._is_dead:
                raise OSError("The actor died.\nIts log has more.") from None
            raise

    def die(self) -> None:
        self._is_dead = True
        if self._task is not None:
            self._task.cancel()

    def cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()


async def connected(serve: StandIn, *, replacement_seconds: float = 0.0) -> RayModel:
    """Make a model of the replicas."""
    handle: Any = serve
    fleet = Fleet(handle, serve.loop)
    try:
        models = await in_loop(serve.loop, fleet.open())
        return RayModel(models, fleet, serve.loop, replacement_seconds=replacement_seconds)
    except BaseException:
        serve.loop.stop()
        raise


@asynccontextmanager
async def opened(serve: StandIn, *, replacement_seconds: float = 0.0) -> AsyncIterator[RayModel]:
    """Give a model of the replicas, and close it in the end."""
    async with await connected(serve, replacement_seconds=replacement_seconds) as model:
        assert isinstance(model, RayModel)
        yield model
