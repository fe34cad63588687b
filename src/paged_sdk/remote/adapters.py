"""Lists, loads and unloads the adapters of a remote engine."""

from __future__ import annotations

import os
from functools import partial
from os import PathLike
from pathlib import Path

from attrs import frozen

from paged_sdk.calls.loaded_adapters import found_adapter
from paged_sdk.config.build import AdapterSource
from paged_sdk.errors import shown
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.messages import LoadAdapter, UnloadAdapter
from paged_sdk.system.threads import in_own_thread
from paged_sdk.types.adapter import AdapterInfo, AdapterUse

__all__ = ["RemoteAdapters"]


@frozen
class RemoteAdapters:
    """Lists, loads and unloads the adapters of a remote engine (an
    :class:`~paged_sdk.calls.loaded_adapters.Adapters`). Adapters are loaded where the engine runs, from paths of its
    machine.

    :ivar is_near: whether the engine runs on this machine, perhaps in another working directory
    """

    engine: RemoteEngine
    is_near: bool = False

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
        location = source.location
        if self.is_near:
            location = await in_own_thread(partial(_from_anywhere, location), "to find an adapter in")
        await self.engine.ask(LoadAdapter(location, source.name), undo=UnloadAdapter(source.name))

    async def unload(self, name: str) -> None:
        await self.engine.ask(UnloadAdapter(name if isinstance(name, str) else shown(name)))


def _from_anywhere(location: str) -> str:
    """Make an existing path absolute, so that it is valid in any working directory; others may be Hub ids."""
    return str(Path(location).absolute()) if os.path.exists(location) else location
