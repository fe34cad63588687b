"""Give later replicas the adapters of the earlier ones."""

from __future__ import annotations

from os import PathLike

from paged_sdk.config.build import AdapterSource
from paged_sdk.routing.adapters import ReplicaAdapters
from paged_sdk.routing.replica import Replica
from paged_sdk.routing.routed_worker import RoutedWorker

__all__ = ["FleetAdapters"]


class FleetAdapters(ReplicaAdapters):
    """Manages the adapters of all replicas (an :class:`~paged_sdk.calls.loaded_adapters.Adapters`), and records what
    was loaded and unloaded.
    """

    def __init__(self, worker: RoutedWorker) -> None:
        super().__init__(worker)
        self._loaded: dict[str, str | PathLike[str]] = {}
        self._unloaded: set[str] = set()

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        source = AdapterSource.of("load_adapter", path, name)
        await super().load(path, name)
        self._loaded[source.name] = path
        self._unloaded.discard(source.name)

    async def unload(self, name: str) -> None:
        if any(name in replica.adapters.names for replica in self._worker.replicas):
            # Recorded before the first await: a replica may be added meanwhile, and the caller may be cancelled.
            self._loaded.pop(name, None)
            self._unloaded.add(name)
        await super().unload(name)

    async def bring(self, replica: Replica) -> None:
        """Load and unload adapters on a replica that was added later.

        :raises PagedError: an adapter cannot be loaded or unloaded
        """
        for name in self._unloaded.intersection(replica.adapters.names):
            await replica.adapters.unload(name)
        for name, path in list(self._loaded.items()):
            if name not in replica.adapters.names:
                await replica.adapters.load(path, name)
