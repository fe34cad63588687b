"""Chooses the device and dtype of a model, and measures the memory of the device."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native import library
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.system.control_groups import control_groups

__all__ = [
    "address_space",
    "choose_device",
    "choose_dtype",
    "device_memory",
    "is_lack_of_memory",
    "process_memory",
    "return_cached_memory",
]

# Messages of out-of-memory errors that are not OutOfMemoryError or MemoryError: torch's for host memory, cuBLAS's and
# cuDNN's, and CUDA's for what torch's allocator does not allocate: pinned memory, events, graphs and loaded kernels.
_LACKS: Final = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA if available, else the CPU. A CUDA device gets its index: without
    one it would mean each thread's current device.

    :raises ConfigError: the device is unknown, or this machine does not have it
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError.of("device", name, '"auto", "cpu", "cuda", "cuda:N" or "mps"') from None
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= there.get(device.type, 0):
        allowed = ", ".join(f'"{kind}"' for kind, count in there.items() if count)
        raise ConfigError.of("device", name, f"a device that this machine has: {allowed}")
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    return torch.device(device.type)  # there is only one; drop an index


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; "auto" is bfloat16 if the hardware computes in it or the native kernels are as
    fast in it, else float32 (CPU) or float16.

    On a CPU with AVX2 only, torch's matrix products are four times slower in bfloat16 than in float32.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cpu":
        native = library.load()
        is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() or (native is not None and native.suits_bfloat16)
        return torch.bfloat16 if is_fast else torch.float32
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float16


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the total and the currently free bytes of a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, free=free)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(total=total, free=total - torch.mps.driver_allocated_memory())
    return process_memory()


def is_lack_of_memory(error: BaseException) -> bool:
    """Tell whether an operation failed for lack of memory, after which devices still work. After other CUDA errors,
    every operation fails.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LACKS)


def return_cached_memory() -> None:
    """Free the CUDA memory that torch caches for later tensors: other models and processes may need it."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized  # it has no annotations
    if is_initialized():
        with suppress(RuntimeError):  # on a failed device every call fails
            torch.cuda.empty_cache()


def process_memory(root: Path = Path("/")) -> DeviceMemory:
    """Return the memory that this process may use: the machine's, or less if the process or its cgroups are limited
    (Linux).

    :param root: parent of ``proc`` and ``sys``; another directory in tests
    """
    limits = [_machine_memory(root), *_group_memory(root)]
    space = address_space(root)
    if space is not None:
        limits.append(space)
    return DeviceMemory(total=min(each.total for each in limits), free=min(each.free for each in limits))


def _group_memory(root: Path) -> Iterator[DeviceMemory]:
    """Yield the memory of each cgroup of the process that has a limit."""
    for group in control_groups("memory", root):
        limit_file, used_file, prefix = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            if group.is_v1
            else ("memory.max", "memory.current", "")
        )
        limit, used = group.read(limit_file).strip(), group.read(used_file).strip()
        if limit.isdigit():
            # The usage includes the page cache, such as a model's files, which the kernel reclaims when memory is
            # needed: count it as free, like the machine's MemAvailable.
            lines = [line.split() for line in group.read("memory.stat").splitlines()]
            files = (f"{prefix}active_file", f"{prefix}inactive_file")
            cached = sum(int(line[1]) for line in lines if line[0] in files)
            in_use = max(0, int(used) - cached) if used.isdigit() else 0
            yield DeviceMemory(total=int(limit), free=max(0, int(limit) - in_use))


def address_space(root: Path = Path("/")) -> DeviceMemory | None:
    """Return the limit of this process's address space and what is left of it (``ulimit -v``); None: no limit.

    Mapped files count, and so does memory that is reserved and never touched.
    """
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        num_pages = int((root / "proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        num_pages = 0
    return DeviceMemory(total=limit, free=max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE")))


def _machine_memory(root: Path) -> DeviceMemory:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        if sys.platform == "win32":
            return _memory_of_windows()
        # Without another library, free memory cannot be distinguished from caches.
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceMemory(total=total, free=total)
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return DeviceMemory(total=kilobytes["MemTotal"] << 10, free=kilobytes["MemAvailable"] << 10)


if sys.platform == "win32":

    class _MemoryStatus(ctypes.Structure):
        """Mirrors MEMORYSTATUSEX: its size, the share in use, and total and free bytes of three kinds of memory."""

        _fields_ = (
            ("size", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("free", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        )

    def _memory_of_windows() -> DeviceMemory:
        status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError()
        return DeviceMemory(total=status.total, free=status.free)
