"""Says how many processors this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_sdk.system.control_groups import control_groups

__all__ = ["keep_on", "kept_on", "numa_nodes", "usable_processors"]


def usable_processors(root: Path = Path("/")) -> int:
    """Return how many threads can compute at the same time: those of the process's affinity, at most its quota.

    :param root: where ``proc`` and ``sys`` lie; another directory in tests
    """
    quotas = [len(_affinity()), *_quotas(root)]
    return max(1, math.ceil(min(quotas)))


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the processors of each part of the machine that has memory of its own, of those that this process may use,
    by the part's number; one part with all of them where the system says nothing of it.

    :param root: where ``sys`` lies; another directory in tests
    """
    usable = _affinity()
    found = {}
    for directory in (root / "sys" / "devices" / "system" / "node").glob("node*"):
        number = directory.name.removeprefix("node")
        if number.isdigit() and (own := usable & _listed(_text(directory / "cpulist"))):
            found[int(number)] = own
    return dict(sorted(found.items())) or {0: usable}


def keep_on(processors: Collection[int] | None) -> None:
    """Have this thread run on these processors alone, and so the threads that it starts from now on; None: on any."""
    if processors is not None:
        os.sched_setaffinity(0, processors)


@contextmanager
def kept_on(processors: Collection[int] | None) -> Iterator[None]:
    """Do the same within the block."""
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    keep_on(processors)
    try:
        yield
    finally:
        keep_on(before)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _listed(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,8,10-11``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the processors that each control group of the process grants."""
    for group in control_groups("cpu", root):
        quota, period = (
            (group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us"))
            if group.is_first
            else (group.read("cpu.max").split() or ["", ""])[:2]
        )
        if quota.strip().isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
