"""Says why an op runs on torch's operations, and logs each reason once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger

__all__ = ["log_fallback", "why_not_triton"]

_log = get_logger(__name__)


def why_not_triton(tensor: Tensor) -> str | None:
    """Say why Triton's kernels cannot serve a tensor's device and dtype; return None if they can."""
    if tensor.dtype == torch.float64:
        return "Triton kernels serve no float64"
    device = tensor.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return f"Triton launches on the current device, which is not {device}: see torch.cuda.set_device"
    return availability.why_not(device)


@cache
def log_fallback(op: str, reason: str) -> None:
    """Log that torch serves an op for this reason, the first time that this happens."""
    _log.info("%s runs on torch operations: %s", op, reason)
