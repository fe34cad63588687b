"""Prepares a device before an engine runs on it: checks memory, and keeps other set-ups away."""

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

__all__ = ["alone_on", "memory_must_do", "memory_must_do_to", "prepare_thread", "weights_must_fit"]

# One lock for the process: a thread that waits for a device breaks what other threads are recording on it.
_ONE_AT_A_TIME: Final = threading.Lock()

# What loading takes beside the weights: tokenizer, tables, and 64 MiB of addresses for malloc's arena of one thread.
_WITHOUT_WEIGHTS: Final = 128 * 2**20

_GPU: Final = re.compile(r"\bGPU (\d+)\b")


@contextmanager
def alone_on(*devices: torch.device) -> Iterator[None]:
    """Make the first CUDA device of some this thread's current one, and set up one model at a time on CUDA devices.

    Pools are sized by the free memory, and a recording must not be disturbed. Models that already run do not disturb
    it.
    """
    device = next((each for each in devices if each.type == "cuda"), None)
    if device is None:
        yield
        return
    with _ONE_AT_A_TIME, torch.cuda.device(device):
        yield


def prepare_thread(device: torch.device, num_threads: int | None) -> None:
    """Set torch's per-thread settings; to be called on the thread that steps an engine.

    :param num_threads: how many CPU threads one of torch's operations uses; None: torch's choice
    """
    if num_threads is not None:
        use_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        make_handle: Callable[[], int] = torch.cuda.current_blas_handle  # it has no annotations
        make_handle()  # of cuBLAS: each thread has its own, which takes time and memory to make


@contextmanager
def memory_must_do(path: Path) -> Iterator[None]:
    """Turn a failure to allocate host memory in the block, which loads a model, into a typed error.

    :raises OutOfMemoryError: the process gets no more memory, because of its limits or the machine's
    """
    space, needed = address_space(), _size_of(path) + _WITHOUT_WEIGHTS
    if space is not None and space.free < needed:
        # Asked beforehand: without memory, libraries that are not Python end the process.
        raise OutOfMemoryError(
            f"{path.name} needs {needed / 2**20:.0f} MiB of addresses to be loaded, and the limit of this process "
            f"(ulimit -v) leaves {space.free / 2**20:.0f} MiB",
            path=path,
            needed=needed,
            available=space.free,
        )
    with memory_must_do_to("load", path):
        yield


@contextmanager
def memory_must_do_to(what: str, path: Path) -> Iterator[None]:
    """Turn a failure to allocate host memory in the block into a typed error.

    :param what: says what the block does with the model
    :raises OutOfMemoryError: the process gets no more memory, because of its limits or the machine's
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
    """Return the bytes of a checkpoint's weights on disk."""
    files = [path] if is_file(path) else path.glob("*.safetensors")
    # Links that lead nowhere are for the reader of the weights to refuse.
    return sum(file.stat().st_size for file in files if is_file(file))


def _is_lack_of_memory(error: MemoryError | RuntimeError | OSError) -> bool:
    # torch says it by a RuntimeError of its allocator, and mmap by an OSError.
    is_torch = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch or getattr(error, "errno", None) == errno.ENOMEM


@contextmanager
def weights_must_fit(path: Path, devices: Sequence[torch.device]) -> Iterator[None]:
    """Turn an allocation failure of the block into a typed error.

    :param devices: those that the weights are for
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
    """Return the device that had no memory left, which torch's message names by its number."""
    found = _GPU.search(str(error))
    on_gpus = [device for device in devices if device.type != "cpu"] or list(devices)
    return next((each for each in on_gpus if found is not None and each.index == int(found[1])), on_gpus[0])
