"""Define the deployment class that runs a replica under Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Protocol

import ray
from attrs import evolve
from ray import serve

from paged_sdk.building import Building
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.errors import EngineDeadError
from paged_sdk.model import Model
from paged_sdk.ray.hung_engine import until_hung
from paged_sdk.ray.sessions import NoSessions, Sessions
from paged_sdk.ray.watch import Watch
from paged_sdk.remote.link import Parcel
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.worker import Worker

__all__ = ["EngineReplica", "ModelBuilder"]


class ModelBuilder(Protocol):
    """Builds a model. It is pickled and sent to the replicas."""

    def build(self) -> Awaitable[Model]: ...


class EngineReplica:
    """Runs a replica: a whole model. Ray Serve constructs it, and calls its methods in one event loop.

    :param step_seconds: the engine hangs if a step takes this long; None: no limit
    :param reports_build_error: whether to keep an exception from building the model for the client, which raises it
        with its type. Ray Serve itself would retry three times, and then only report a failure
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, builder: ModelBuilder, *, step_seconds: float | None, reports_build_error: bool = False
    ) -> None:
        self._model: Model | None = None
        self._hang: EngineDeadError | None = None
        self._sessions: Sessions | NoSessions
        try:
            self._model = await _building(builder)
        except Exception as error:
            if not reports_build_error:
                raise
            self._sessions = NoSessions(error)
        else:
            sessions = Sessions(serve.get_replica_context().replica_id.unique_id, self._model._insides)
            self._sessions = sessions
            self._watching = asyncio.ensure_future(self._watch(sessions, self._model._insides.worker, step_seconds))

    async def _watch(self, sessions: Sessions, worker: EngineAccess, step_seconds: float | None) -> None:
        assert isinstance(worker, Worker), "its engine runs here"
        self._hang = EngineDeadError(await until_hung(worker, step_seconds))
        sessions.fail(self._hang)

    async def watch(self, watch: Watch) -> None:
        """Do nothing: the router of the call registers the watch."""

    async def listen(self, session_id: str, target: str) -> AsyncGenerator[list[Parcel]]:
        """Open a session: see :meth:`Sessions.listen`."""
        async with aclosing(self._sessions.listen(session_id, target)) as said:
            async for parcels in said:
                yield parcels

    async def take(self, session_id: str, parcels: list[Parcel], target: str) -> None:
        """Receive parcels of a session; ignored if the session has ended."""
        self._sessions.take(session_id, parcels)

    def check_health(self) -> None:
        """Raise if the engine has died or hangs: Ray Serve then starts another replica."""
        self._sessions.end_silent()
        if self._hang is not None:
            raise self._hang
        if self._model is not None:
            self._model.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of running and waiting sequences, for autoscaling."""
        stats = ModelStats() if self._model is None else self._model.stats()
        return {"texts": float(stats.running + stats.waiting)}

    async def __del__(self) -> None:
        if self._model is not None:
            await self._model.aclose()


def _building(builder: ModelBuilder) -> Awaitable[Model]:
    """Build a model with as many threads as Ray reserves CPUs for the replica, unless the builder sets a number."""
    source, settings = getattr(builder, "source", None), getattr(builder, "settings", None)
    if not isinstance(source, ModelSource) or not isinstance(settings, BuildSettings) or settings.num_threads:
        return builder.build()
    kept = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    return Building(source, evolve(settings, num_threads=max(int(kept), 1)))
