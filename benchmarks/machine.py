"""Describe the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paged_sdk.system.processors import usable_processors

__all__ = ["describe_machine", "instruction_sets"]

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, software, the commit, and how busy the machine was."""
    cpu, sets = _cpu_info(), instruction_sets()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": f"{cpu.get('cpu family', '')}.{cpu.get('model', '')}".strip("."),
        "cpus": usable_processors(),
        "instruction_sets": [flag for flag in _FLAGS if flag in sets],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "src") else ""),
        "load_average": round(os.getloadavg()[0], 2),
    }


def instruction_sets() -> frozenset[str]:
    """Return the processor's instruction sets as Linux lists them; empty on other systems."""
    cpu = _cpu_info()
    return frozenset(cpu.get("flags", cpu.get("Features", "")).split())


def _cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
