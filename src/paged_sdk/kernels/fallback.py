"""Says why an op runs on torch's operations, and logs each reason once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger

__all__ = ["device_of", "log_fallback", "why_not_triton"]

_log = get_logger(__name__)


def why_not_triton(tensor: Tensor) -> str | None:
    """Say why Triton's kernels cannot serve a tensor's device and dtype; return None if they can.

    They are launched on the current device, which has to be the tensor's: see :func:`device_of`.
    """
    if tensor.dtype == torch.float64:
        return "Triton kernels serve no float64"
    return availability.why_not(tensor.device)


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make a tensor's CUDA device the current one for a while; on others nothing happens."""
    enter: Any = torch.cuda.device_of  # it has no annotations
    scope: AbstractContextManager[None] = enter(tensor)
    return scope


@cache
def log_fallback(op: str, reason: str) -> None:
    """Log that torch serves an op for this reason, the first time that this happens."""
    _log.info("%s runs on torch operations: %s", op, reason)
