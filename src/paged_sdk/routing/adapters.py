"""Manages the adapters of several replicas, which all load the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import anyio

from paged_sdk.calls.loaded_adapters import Adapters
from paged_sdk.config.build import AdapterSource
from paged_sdk.errors import ConfigError, EngineDeadError, ModelClosedError
from paged_sdk.routing.replica import Replica
from paged_sdk.routing.routed_worker import RoutedWorker, none_runs
from paged_sdk.types.adapter import AdapterInfo, AdapterUse

__all__ = ["ReplicaAdapters"]


class ReplicaAdapters:
    """Loads and unloads adapters in all replicas (an :class:`~paged_sdk.calls.loaded_adapters.Adapters`)."""

    def __init__(self, worker: RoutedWorker) -> None:
        self._worker = worker

    @property
    def names(self) -> tuple[str, ...]:
        return () if (first := self._first()) is None else first.names

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return () if (first := self._first()) is None else first.infos

    def use(self, name: str | None) -> AdapterUse | None:
        if name is None:
            return None
        if (first := self._first()) is None:
            raise none_runs()
        return first.use(name)

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        """Load an adapter into all replicas. If one fails, unload it from the others."""
        self._worker.check()
        source = AdapterSource.of("load_adapter", path, name)
        done: list[Replica] = []
        try:
            for replica in self._living():
                await replica.adapters.load(path, name)
                done.append(replica)
        except BaseException:
            await _unload(source.name, done)
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter from all replicas. Replicas that do not have it, or have died, do not prevent this.

        :raises ConfigError: no replica has it
        """
        self._worker.check()
        every = self._living()
        errors = await _unload(name, every)
        others = [error for error in errors if not isinstance(error, ConfigError | EngineDeadError | ModelClosedError)]
        if others or len(errors) == len(every):
            raise [*others, *errors][0]

    def _living(self) -> list[Replica]:
        every = self._worker.replicas
        return [each for each in every if each.why_not is None] or [*every[:1]] or [self._worker.last]

    def _first(self) -> Adapters | None:
        return next((each.adapters for each in self._living()), None)


async def _unload(name: str, replicas: Sequence[Replica]) -> list[Exception]:
    """Unload an adapter from several replicas concurrently, and return the errors. If the caller is cancelled,
    unloading has begun in all replicas, and continues there.
    """
    errors: list[Exception] = []

    async def unload(replica: Replica) -> None:
        try:
            await replica.adapters.unload(name)
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for replica in replicas:
            tasks.start_soon(unload, replica)
    return errors
