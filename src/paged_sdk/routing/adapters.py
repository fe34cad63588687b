"""Know the adapters of several replicas, which have the same."""

from __future__ import annotations

from os import PathLike

from paged_sdk.loaded_adapters import Adapters
from paged_sdk.routing.routed_worker import Replica, RoutedWorker, none_runs
from paged_sdk.types.adapter import AdapterInfo, AdapterUse

__all__ = ["ReplicaAdapters"]


class ReplicaAdapters:
    """Knows the adapters of all replicas, which have the same (an :class:`~paged_sdk.loaded_adapters.Adapters`)."""

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
        """Load an adapter everywhere, or nowhere."""
        self._worker.check()
        before = self.names
        done: list[Replica] = []
        try:
            for replica in self._living():
                await replica.adapters.load(path, name)
                done.append(replica)
        except BaseException:
            for replica in done:
                for new in set(replica.adapters.names).difference(before):
                    await replica.adapters.unload(new)
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter everywhere."""
        self._worker.check()
        for replica in self._living():
            await replica.adapters.unload(name)

    def _living(self) -> list[Replica]:
        every = self._worker.replicas
        return [each for each in every if each.why_not is None] or [*every[:1]] or [self._worker.last]

    def _first(self) -> Adapters | None:
        return next((each.adapters for each in self._living()), None)
