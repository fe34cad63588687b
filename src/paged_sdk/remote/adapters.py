"""Knows the adapters of an engine that runs elsewhere."""

from __future__ import annotations

from os import PathLike

from attrs import frozen

from paged_sdk.config.build import AdapterSource
from paged_sdk.errors import shown
from paged_sdk.loaded_adapters import found_adapter
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.messages import LoadAdapter, UnloadAdapter
from paged_sdk.types.adapter import AdapterInfo, AdapterUse

__all__ = ["RemoteAdapters"]


@frozen
class RemoteAdapters:
    """Knows by name what adapters an engine has (an :class:`~paged_sdk.loaded_adapters.Adapters`). They are loaded
    where it runs, so paths are those of its machine.
    """

    engine: RemoteEngine

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.engine.adapters)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(use.info for use in self.engine.adapters.values())

    def use(self, name: str | None) -> AdapterUse | None:
        return found_adapter(self.engine.adapters, name)

    async def load(self, path: str | PathLike[str], name: str | None) -> None:
        source = AdapterSource.of("load_adapter", path, name)
        await self.engine.ask(LoadAdapter(source.location, source.name), undo=UnloadAdapter(source.name))

    async def unload(self, name: str) -> None:
        await self.engine.ask(UnloadAdapter(name if isinstance(name, str) else shown(name)))
