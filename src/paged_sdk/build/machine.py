"""Describes the machine, and which of its features this package uses."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from paged_sdk.system.processors import usable_processors

__all__ = ["GpuReport", "MachineReport", "describe_machine"]

PACKAGES: Final = (
    "triton",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "llguidance",
    "starlette",
    "uvicorn",
    "pillow",
)

FEATURES: Final = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
)
"""CPU features that the choice of kernels depends on, by Linux's names."""


@frozen(kw_only=True)
class GpuReport:
    """Describes a CUDA device.

    :ivar name: the vendor's name for it
    :ivar capability: its compute capability, such as "9.0"
    :ivar memory_mib: its memory in MiB
    :ivar free_mib: its free memory in MiB
    :ivar why_no_triton: why Triton's kernels cannot run there; None: they can
    """

    name: str
    capability: str
    memory_mib: int
    free_mib: int
    why_no_triton: str | None


@frozen(kw_only=True)
class MachineReport:
    """Describes a machine, and which of its features are used.

    :ivar package: this package's version
    :ivar python: the interpreter's version
    :ivar system: the operating system
    :ivar processor: its name; empty if unknown
    :ivar num_processors: how many this process may use, by its affinity and cgroup quotas
    :ivar features: the processor's instruction sets that kernels exist for; empty if unknown
    :ivar kernel_level: the instruction-set level of the native CPU kernels; None: there are none
    :ivar kernel_levels: all levels that this machine can run, best first
    :ivar why_no_kernels: why there are no native kernels, so that torch operations are used; None: there are
    :ivar dtype: what "auto" means on the CPU
    :ivar memory_mib: memory that this process may use, in MiB
    :ivar free_mib: of that, what is free
    :ivar address_mib: limit of the process's address space in MiB (``ulimit -v``); None: no limit
    :ivar gpus: the CUDA devices
    :ivar versions: of torch and other relevant packages; None: not installed
    """

    package: str
    python: str
    system: str
    processor: str
    num_processors: int
    features: tuple[str, ...]
    kernel_level: str | None
    kernel_levels: tuple[str, ...]
    why_no_kernels: str | None
    dtype: str
    memory_mib: int
    free_mib: int
    address_mib: int | None
    gpus: tuple[GpuReport, ...]
    versions: Mapping[str, str | None]

    @property
    def processor_name(self) -> str:
        """Return the processor's name, for display."""
        return self.processor or "unknown processor"

    @property
    def kernels(self) -> str:
        """Say which CPU kernels are used: the level of the native ones, or why there are none."""
        return self.kernel_level or f"torch's, because {self.why_no_kernels}"

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return asdict(self)


def describe_machine() -> MachineReport:
    """Describe the machine that models would run on. This changes nothing, but opens a CUDA device if there is one."""
    # Imported here and below, because the tensor libraries take over a second.
    import torch

    from paged_sdk.kernels.native import library
    from paged_sdk.runner.device import address_space, choose_dtype, device_memory

    cpu = torch.device("cpu")
    memory, space = device_memory(cpu), address_space()
    name, features = _processor()
    loaded = library.load()
    return MachineReport(
        package=version("paged-sdk"),
        python=platform.python_version(),
        system=platform.platform(),
        processor=name,
        num_processors=usable_processors(),
        features=features,
        kernel_level=None if loaded is None else loaded.isa,
        kernel_levels=library.available_levels(),
        why_no_kernels=library.why_not(),
        dtype=str(choose_dtype("auto", cpu)).removeprefix("torch."),
        memory_mib=memory.total >> 20,
        free_mib=memory.free >> 20,
        address_mib=None if space is None else space.total >> 20,
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)),
        # torch itself says what it was built for, as in 2.13.0+cu130; the name of its package on PyPI does not.
        versions={"torch": str(torch.__version__), **{package: _version(package) for package in PACKAGES}},
    )


def _processor(file: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and features, as far as the system reports them.

    :param file: Linux's cpuinfo; another file in tests
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor(), ()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    there = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.processor(), tuple(name for name in FEATURES if name in there)


def _gpu(index: int) -> GpuReport:
    import torch

    from paged_sdk.kernels.triton import availability
    from paged_sdk.runner.device import device_memory

    device = torch.device("cuda", index)
    memory = device_memory(device)
    major, minor = torch.cuda.get_device_capability(device)
    return GpuReport(
        name=torch.cuda.get_device_name(device),
        capability=f"{major}.{minor}",
        memory_mib=memory.total >> 20,
        free_mib=memory.free >> 20,
        why_no_triton=availability.why_not(device),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
