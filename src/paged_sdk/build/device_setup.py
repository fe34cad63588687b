"""Prepares devices and threads for an engine: checks memory, and lets one model at a time be set up."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from paged_sdk.errors import OutOfMemoryError, PagedError
from paged_sdk.kernels.torch_threads import use_threads
from paged_sdk.runner.device import address_space, device_memory
from paged_sdk.system.files import is_file

__all__ = ["alone_on", "host_memory_errors", "loading_memory_errors", "prepare_thread", "weights_must_fit"]

# One lock for the process: a thread that synchronizes with a device breaks CUDA graph captures of other threads.
_ONE_AT_A_TIME: Final = threading.Lock()

# Address space that loading needs besides the weights: tokenizer, tables, and 64 MiB for one thread's malloc arena.
_WITHOUT_WEIGHTS: Final = 128 * 2**20

_GPU: Final = re.compile(r"\bGPU (\d+)\b")


@contextmanager
def alone_on(*devices: torch.device) -> Iterator[None]:
    """Hold the lock for setting up a model on CUDA, and make the first CUDA device this thread's current one.

    Pools are sized by free memory, and setting up another model would break a recording. Models that are already
    running do not. Without a CUDA device this does nothing.
    """
    device = next((each for each in devices if each.type == "cuda"), None)
    if device is None:
        yield
        return
    with _ONE_AT_A_TIME, torch.cuda.device(device):
        yield


def prepare_thread(device: torch.device, num_threads: int | None) -> None:
    """Set torch's per-thread settings; call this on the thread that steps an engine.

    :param num_threads: number of CPU threads of a torch operation; None: torch's default
    """
    if num_threads is not None:
        use_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        make_handle: Callable[[], int] = torch.cuda.current_blas_handle  # it has no annotations
        make_handle()  # each thread has its own cuBLAS handle, which takes time and memory to make


@contextmanager
def loading_memory_errors(path: Path) -> Iterator[None]:
    """Turn a failure to allocate host memory in the block, which loads a model, into a typed error.

    :raises OutOfMemoryError: the limits of the process or of the machine leave too little memory
    """
    space, needed = address_space(), _size_of(path) + _WITHOUT_WEIGHTS
    if space is not None and space.free < needed:
        # Checked beforehand: native libraries end the process if they cannot allocate.
        raise OutOfMemoryError(
            f"{path.name} needs {needed / 2**20:.0f} MiB of addresses to be loaded, and the limit of this process "
            f"(ulimit -v) leaves {space.free / 2**20:.0f} MiB",
            path=path,
            needed=needed,
            available=space.free,
        )
    with host_memory_errors("load", path):
        yield


@contextmanager
def host_memory_errors(what: str, path: Path) -> Iterator[None]:
    """Turn a failure to allocate host memory in the block into a typed error.

    :param what: verb for what the block does with the model, such as "load"
    :raises OutOfMemoryError: the limits of the process or of the machine leave too little memory
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, PagedError) or not _is_lack_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
        raise OutOfMemoryError(
            f"the memory that this process may have is not enough to {what} {path.name}: {reason}",
            path=path,
            available=device_memory(torch.device("cpu")).free,
        ) from error


def _size_of(path: Path) -> int:
    """Return the size of a checkpoint's weights on disk in bytes."""
    files = [path] if is_file(path) else path.glob("*.safetensors")
    # Broken links are skipped here; the weight reader rejects them.
    return sum(file.stat().st_size for file in files if is_file(file))


def _is_lack_of_memory(error: MemoryError | RuntimeError | OSError) -> bool:
    # torch's CPU allocator raises a RuntimeError, and mmap an OSError.
    is_torch = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch or getattr(error, "errno", None) == errno.ENOMEM


@contextmanager
def weights_must_fit(path: Path, devices: Sequence[torch.device]) -> Iterator[None]:
    """Turn a failure to allocate device memory in the block into a typed error.

    :param devices: the devices that the weights are loaded to
    :raises OutOfMemoryError: a device runs out of memory while the weights are loaded
    """
    free = {device: device_memory(device).free for device in devices}
    try:
        yield
    except torch.OutOfMemoryError as error:
        needed, device = _size_of(path), _device_that_lacks(error, devices)
        share = "" if len(free) == 1 else ", or the part of them that is for it,"
        raise OutOfMemoryError(
            f"the weights of {path.name}, {needed / 2**20:.1f} MiB of files{share} do not fit {device}: "
            f"{free[device] / 2**20:.1f} MiB were free",
            path=path,
            needed=needed,
            available=free[device],
        ) from error


def _device_that_lacks(error: torch.OutOfMemoryError, devices: Sequence[torch.device]) -> torch.device:
    """Return the device that ran out of memory, by the GPU number in torch's message."""
    found = _GPU.search(str(error))
    on_gpus = [device for device in devices if device.type != "cpu"] or list(devices)
    return next((each for each in on_gpus if found is not None and each.index == int(found[1])), on_gpus[0])
