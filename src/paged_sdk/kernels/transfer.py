"""Copies between the host and a device without waiting for the device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["HostCopies", "to_device"]

_ALIGNMENT: Final = 16  # Triton compiles a kernel anew for pointers that are aligned to less


def to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Copy arrays to a device at once, without waiting: the pinned memory is kept until the copy is done.

    :returns: on CUDA, parts of one piece of memory, each aligned to 16 bytes; on the CPU the arrays' own memory
    """
    if device.type != "cuda":  # others have no pinned memory, so every copy is waited for
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    # No name holds the pinned memory, so that it goes at once: see HostCopies.
    parts = torch.split(_pinned(arrays, sizes).to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def _pinned(arrays: Sequence[npt.NDArray[Any]], sizes: list[int]) -> Tensor:
    """Copy arrays into one piece of pinned memory, each into so many bytes of it."""
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, array in zip(torch.split(host, sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = array.view(np.uint8).ravel()
    return host


class HostCopies:
    """Copies tensors of one device to pinned memory of the host, and waits for the copies when asked.

    On the CPU, and on devices other than CUDA's, the copies are waited for at once.

    Pinned memory must not be let go of once a device has failed: torch records an event on each stream that has used
    the memory, and where the device refuses that, it ends the process. So nobody else gets to hold it, it goes as soon
    as the copies are there, and what a failed device was to copy to is kept for ever.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies: list[Tensor] = []
        self._stream: Any = None  # that the copies are under way on; None: they are there
        self._event: Any = None
        device = tensors[0].device
        if device.type != "cuda":
            self._copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        self._stream = torch.cuda.current_stream(device)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event: Any = torch.cuda.Event  # it has no annotations
        self._event = event()
        self._event.record(self._stream)

    def wait(self) -> list[Tensor]:
        """Wait until the copies are there, without the interpreter's lock, and return them, in memory of their own."""
        if self._stream is not None:
            self._event.synchronize()
            self._copies = [copy.clone() for copy in self._copies]
            self._stream = self._event = None
        return self._copies

    def __del__(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.query()
        except RuntimeError:  # the device has failed
            # No object may hold them either: a module's are let go of when the interpreter ends.
            for copy in self._copies:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))
