"""Determines whether Triton kernels can run on a device, and its number of multiprocessors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Final

import torch

__all__ = ["launch_errors", "num_multiprocessors", "why_not"]

# Ampere is the first with bfloat16 matrix instructions; Triton itself requires compute capability 7.0.
_OLDEST: Final = (8, 0)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run compiled on a device, or None if they can."""
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
    """Start Triton's driver, and return why that fails, or None if it succeeds.

    The driver has a C compiler build the launcher. A launch would raise the same errors, of any class: without a
    compiler, Python's headers, libcuda where the linker looks, or a writable cache directory.
    """
    try:
        importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    except Exception as error:
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
        return f"Triton, which needs gcc or clang and Python's headers, does not start: {said}"
    return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, each of which runs one or more programs."""
    if device.type != "cuda":
        return 1  # the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a launch may raise without breaking the device: torch's, and Triton's for failed
    compilations and kernels that need more resources than the device has.
    """
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    error: type[Exception] = importlib.import_module("triton.errors").TritonError
    return (RuntimeError, error)
