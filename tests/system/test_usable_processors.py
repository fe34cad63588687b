"""How many processors a process may use: its affinity, and the quotas of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_sdk.system.processors import numa_nodes, pinned_thread, usable_processors


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def nodes(root: Path, **lists: str) -> Path:
    return system(root, "", {f"sys/devices/system/node/{name}/cpulist": text for name, text in lists.items()})


def test_nodes_have_the_processors_that_may_be_used(tmp_path: Path) -> None:
    root = nodes(tmp_path, node0="0-1,4\n", node1="2-3,6,9-12\n", node10="5\n", node2="40-41\n", node3="\n")
    assert numa_nodes(root) == {0: {0, 1, 4}, 1: {2, 3, 6}, 10: {5}}


def test_a_system_without_nodes_is_one(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == {0: set(range(8))}


def test_without_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_processors(tmp_path) == 8


def test_a_system_without_affinity_has_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_processors(tmp_path) == 5


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("20000 100000", 1), ("1600000 100000", 8)],
)
def test_a_quota_is_rounded_up(tmp_path: Path, quota: str, expected: int) -> None:
    root = system(tmp_path, "0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": quota, "sys/fs/cgroup/cpu.max": "max 100000"})
    assert usable_processors(root) == expected


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "600000 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}
    assert usable_processors(system(tmp_path, "0::/a/b\n", files)) == 3


def test_in_a_container_the_top_is_its_own(tmp_path: Path) -> None:
    assert usable_processors(system(tmp_path, "0::/host/x\n", {"sys/fs/cgroup/cpu.max": "400000 100000"})) == 4


def test_the_first_interface(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}
    assert usable_processors(system(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/x\n", files)) == 3
    files["sys/fs/cgroup/cpu/x/cpu.cfs_quota_us"] = "-1\n"  # none
    assert usable_processors(system(tmp_path, "3:cpu,cpuacct:/x\n", files)) == 8


def test_the_real_system_has_some() -> None:
    assert 1 <= usable_processors() <= 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
def test_a_thread_is_kept_on_processors_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with pinned_thread(one):
        assert os.sched_getaffinity(0) == one
        assert usable_processors() == 1
    with pinned_thread(None):
        assert os.sched_getaffinity(0) == before
