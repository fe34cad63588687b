"""Counts compiled kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton import JITFunction

__all__ = ["CompiledKernels"]


class CompiledKernels:
    """Counts the variants of this package's kernels that this process has compiled for a device, or loaded from
    Triton's cache.

    :param device: the index of the device
    """

    def __init__(self, device: int) -> None:
        found: dict[str, Any] = {}
        for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
            own = importlib.import_module(f"{__package__}.{module.name}")
            found |= {name: each for name, each in vars(own).items() if isinstance(each, JITFunction)}
        # Triton does not document the structure of these caches.
        self._caches: dict[str, Mapping[int, Any]] = {
            name: getattr(kernel, "device_caches", {}) for name, kernel in found.items()
        }
        self._device = device

    @property
    def total(self) -> int:
        """Return the number of variants of all kernels."""
        return sum(len(caches[self._device][0]) for caches in self._caches.values() if self._device in caches)

    def by_name(self) -> Mapping[str, int]:
        """Return the number of variants by kernel name."""
        return {name: len(caches[self._device][0]) for name, caches in self._caches.items() if self._device in caches}
