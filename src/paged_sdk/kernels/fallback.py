"""Decides whether an op runs on Triton kernels or falls back to torch operations, and logs each reason once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger

__all__ = ["device_of", "log_fallback", "runs_on_triton", "why_not_triton"]

_log = get_logger(__name__)


def why_not_triton(tensor: Tensor) -> str | None:
    """Return why Triton kernels cannot serve a tensor's device and dtype, or None if they can.

    Triton launches kernels on the current device, which must be the tensor's: see :func:`device_of`.
    """
    if tensor.dtype == torch.float64:
        return "Triton kernels serve no float64"
    return availability.why_not(tensor.device)


def runs_on_triton(op: str, tensor: Tensor) -> bool:
    """Return whether Triton kernels serve an op for a tensor's device and dtype; log why if they do not."""
    reason = why_not_triton(tensor)
    if reason is not None:
        log_fallback(op, reason)
    return reason is None


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make a tensor's CUDA device the current one within the context; do nothing for other devices."""
    enter: Any = torch.cuda.device_of  # it has no annotations
    scope: AbstractContextManager[None] = enter(tensor)
    return scope


@cache
def log_fallback(op: str, reason: str) -> None:
    """Log, once per op and reason, that torch operations serve an op."""
    _log.info("%s runs on torch operations: %s", op, reason)
