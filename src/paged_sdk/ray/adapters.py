"""Give replicas that come later the adapters that the others have."""

from __future__ import annotations

from os import PathLike

from paged_sdk.routing.adapters import ReplicaAdapters
from paged_sdk.routing.routed_worker import Replica, RoutedWorker

__all__ = ["FleetAdapters"]


class FleetAdapters(ReplicaAdapters):
    """Remembers what was loaded and unloaded (an :class:`~paged_sdk.loaded_adapters.Adapters`)."""

    def __init__(self, worker: RoutedWorker) -> None:
        super().__init__(worker)
        self._loaded: dict[str, str | PathLike[str]] = {}
        self._unloaded: set[str] = set()

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        before = set(self.names)
        await super().load(path, name)
        for new in set(self.names) - before:
            self._loaded[new] = path
            self._unloaded.discard(new)

    async def unload(self, name: str) -> None:
        await super().unload(name)
        self._loaded.pop(name, None)
        self._unloaded.add(name)

    async def bring(self, replica: Replica) -> None:
        """Load and unload what a replica has not heard of.

        :raises PagedError: it cannot
        """
        for name in self._unloaded.intersection(replica.adapters.names):
            await replica.adapters.unload(name)
        for name, path in list(self._loaded.items()):
            if name not in replica.adapters.names:
                await replica.adapters.load(path, name)
