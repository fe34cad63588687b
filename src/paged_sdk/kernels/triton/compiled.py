"""Counts the kernels that Triton has compiled."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton import JITFunction

__all__ = ["CompiledKernels"]


class CompiledKernels:
    """Counts variants of this package's kernels, of all that this process has compiled for a device or loaded for it
    from Triton's cache.

    :param device: the index of the device
    """

    def __init__(self, device: int) -> None:
        found: dict[str, Any] = {}
        for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
            own = importlib.import_module(f"{__package__}.{module.name}")
            found |= {name: each for name, each in vars(own).items() if isinstance(each, JITFunction)}
        # Triton documents these caches no more than that it has any.
        self._caches: dict[str, Mapping[int, Any]] = {
            name: getattr(kernel, "device_caches", {}) for name, kernel in found.items()
        }
        self._device = device

    @property
    def total(self) -> int:
        """Return how many there are."""
        return sum(len(caches[self._device][0]) for caches in self._caches.values() if self._device in caches)

    def by_name(self) -> Mapping[str, int]:
        """Return how many variants there are of each kernel."""
        return {name: len(caches[self._device][0]) for name, caches in self._caches.items() if self._device in caches}
