"""Run this project as installed without a compiler: with torch operations only."""

from __future__ import annotations

from types import MappingProxyType

from benchmarks.engines import paged_sdk
from benchmarks.protocol import EngineSettings

__all__ = ["Engine"]


class Engine(paged_sdk.Engine):
    """Hides the native library before anything loads it."""

    REQUIREMENTS = ()
    ISAS = MappingProxyType({})

    def __init__(self, settings: EngineSettings) -> None:
        from paged_sdk.kernels.native import library

        library._PATH = library._PATH.with_name("hidden.so")
        assert library.load() is None
        super().__init__(settings)
