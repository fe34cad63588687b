"""Copies between the host and a device without waiting for the device."""

from __future__ import annotations

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
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, array in zip(torch.split(host, sizes), arrays, strict=True):
        part.numpy()[: array.nbytes] = array.view(np.uint8).ravel()
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


class HostCopies:
    """Copies tensors of one device to pinned memory of the host, and waits for the copies when asked.

    On the CPU, and on devices other than CUDA's, the copies are waited for at once.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: Any = None
        device = tensors[0].device
        if device.type != "cuda":
            self._copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event: Any = torch.cuda.Event  # it has no annotations
        self._event = event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Wait until the copies are there, without the interpreter's lock, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
