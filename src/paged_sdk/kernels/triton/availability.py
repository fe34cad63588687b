"""Says whether Triton's kernels can run on a device, and how many multiprocessors it has."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Final

import torch

__all__ = ["launch_errors", "num_multiprocessors", "why_not"]

# bfloat16 products in hardware begin with Ampere; Triton itself serves nothing older than compute capability 7.0.
_OLDEST: Final = (8, 0)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Say why Triton's kernels cannot run compiled on a device; return None if they can."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'paged-sdk[cuda]'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        has = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"{has}: Triton kernels need 8.0 (Ampere) or newer"
    return _why_not_started()


def _why_not_started() -> str | None:
    """Start Triton's driver, and say why that fails; return None if it does not.

    It has a C compiler build what all launches go through. A launch would meet the same errors, of any class: without a
    compiler, Python's headers, the device's library where the linker looks, or a directory to keep kernels in.
    """
    try:
        importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    except Exception as error:
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
        return f"Triton, which needs gcc or clang and Python's headers, does not start: {said}"
    return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has, each of which runs one or more programs."""
    if device.type != "cuda":
        return 1  # the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_errors() -> tuple[type[Exception], ...]:
    """Return what a launch may raise on a device that it leaves sound: torch's errors, and those of Triton's compiler
    and of kernels that ask for more than the device has.
    """
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    error: type[Exception] = importlib.import_module("triton.errors").TritonError
    return (RuntimeError, error)
