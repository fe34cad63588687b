"""From the host to a device without waiting for it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["to_device"]

_ALIGNMENT: Final = 16  # Triton compiles a kernel anew for pointers that are aligned to less


def to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Tensors like some arrays, by one copy, which nobody waits for: pinned memory is kept until it is done.

    :returns: on CUDA, parts of one piece of memory, each aligned to 16 bytes; on the CPU the arrays' own memory
    """
    if device.type != "cuda":  # others have no pinned memory, so there is nothing that need not be waited for
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
