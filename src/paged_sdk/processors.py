"""Says how many processors this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_processors"]


def usable_processors(root: Path = Path("/")) -> int:
    """Return how many threads can compute at the same time: those of the process's affinity, at most its quota.

    :param root: where ``proc`` and ``sys`` lie; another directory in tests
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [affinity, *_quotas(root)]
    return max(1, math.ceil(min(quotas)))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the processors that each control group of the process grants (Linux, both versions of the interface)."""
    groups = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups
        directory = top / path.lstrip("/")
        # In a container the path may be that of the host, where it leads nowhere: then the top is the process's own.
        for group in (directory, *directory.parents):
            quota, period = (
                (_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))
                if controllers
                else (_text(group / "cpu.max").split() or ["", ""])[:2]
            )
            if quota.strip().isdigit() and period.strip().isdigit():
                yield int(quota) / int(period)
            if group == top:
                break


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
