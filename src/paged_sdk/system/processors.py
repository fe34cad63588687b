"""Counts the processors that this process may use, and pins threads to processors."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_sdk.system.control_groups import control_groups

__all__ = ["numa_nodes", "pin_thread", "pinned_thread", "usable_processors"]


def usable_processors(root: Path = Path("/")) -> int:
    """Return how many threads can run in parallel: the processors of the process's affinity, limited by its CPU quota.

    :param root: the directory of ``proc`` and ``sys``; another one in tests
    """
    quotas = [len(_affinity()), *_quotas(root)]
    return max(1, math.ceil(min(quotas)))


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the usable processors of each NUMA node, by the node's number; all as node 0 if the system lists no nodes.

    :param root: the directory of ``sys``; another one in tests
    """
    usable = _affinity()
    found = {}
    for directory in (root / "sys" / "devices" / "system" / "node").glob("node*"):
        number = directory.name.removeprefix("node")
        if number.isdigit() and (own := usable & _listed(_text(directory / "cpulist"))):
            found[int(number)] = own
    return dict(sorted(found.items())) or {0: usable}


def pin_thread(processors: Collection[int] | None) -> None:
    """Pin this thread, and threads that it starts from now on, to these processors; None: change nothing."""
    if processors is not None:
        os.sched_setaffinity(0, processors)


@contextmanager
def pinned_thread(processors: Collection[int] | None) -> Iterator[None]:
    """Pin this thread to these processors within the block; None: change nothing."""
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin_thread(processors)
    try:
        yield
    finally:
        pin_thread(before)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _listed(text: str) -> frozenset[int]:
    """Parse a list of numbers such as ``0-3,8,10-11``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota of each cgroup of the process, in processors."""
    for group in control_groups("cpu", root):
        quota, period = (
            (group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us"))
            if group.is_v1
            else (group.read("cpu.max").split() or ["", ""])[:2]
        )
        if quota.strip().isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
