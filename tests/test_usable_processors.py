"""How many processors a process may use: its affinity, and the quotas of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_sdk.processors import usable_processors


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


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
