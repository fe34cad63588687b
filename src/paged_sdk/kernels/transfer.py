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

_ALIGNMENT: Final = 16  # Triton compiles another variant of a kernel for less aligned pointers


def to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Copy arrays to a device in one transfer, without waiting; torch keeps the pinned memory until the copy is done.

    :returns: on CUDA, views of one allocation, each aligned to 16 bytes; on the CPU, the arrays' own memory
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":  # other devices have no pinned memory, so copies are synchronous
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    # No variable refers to the pinned memory, so that it is released at once: see HostCopies.
    parts = torch.split(_pinned(arrays, sizes).to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def _pinned(arrays: Sequence[npt.NDArray[Any]], sizes: list[int]) -> Tensor:
    """Copy arrays into one pinned allocation.

    :param sizes: the bytes that each array gets, padding included
    """
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, array in zip(torch.split(host, sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = array.view(np.uint8).ravel()
    return host


class HostCopies:
    """Copies tensors of one device to pinned host memory, and waits for the copies when asked.

    For the CPU and non-CUDA devices, copies are synchronous.

    Pinned memory must not be freed after its device has failed: torch then records an event on each stream that used
    the memory, and ends the process if the device refuses. So the pinned memory is private, is freed as soon as the
    copies are done, and is never freed if the device has failed.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies: list[Tensor] = []
        self._stream: Any = None  # the stream of copies in progress; None: they are done
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
        """Wait for the copies, with the GIL released, and return them in unpinned memory."""
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
            # Leaked by a reference count: a list in a module would be freed when the interpreter exits.
            for copy in self._copies:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))
