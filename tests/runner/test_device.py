"""What "auto" stands for as dtype, by what the processor and the native library offer; and what memory there is."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from paged_sdk.kernels.native import library
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.runner.device import choose_dtype, process_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("in_hardware", "level", "dtype"),
    [
        (True, "portable", torch.bfloat16),
        (True, None, torch.bfloat16),
        (False, "avx_vnni", torch.bfloat16),
        (False, "avx2", torch.bfloat16),
        (False, "neon_dotprod", torch.float32),
        (False, "portable", torch.float32),
        (False, None, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_it_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, in_hardware: bool, level: str | None, dtype: torch.dtype
) -> None:
    loaded = None if level is None else library.NativeLibrary(ctypes.CDLL(None), isa=level, level=0)
    monkeypatch.setattr(library, "load", lambda: loaded)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: in_hardware)
    assert choose_dtype("auto", CPU) is dtype


def test_a_dtype_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert [choose_dtype(name, CPU) for name in ("bfloat16", "float32")] == [torch.bfloat16, torch.float32]


def system(root: Path, group: str, files: Mapping[str, object]) -> Path:
    machine = "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 6000 kB"
    for name, text in {"proc/meminfo": machine, "proc/self/cgroup": group, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


SECOND = ("0::/a/b", "sys/fs/cgroup", "max", "current", "")
FIRST = ("4:memory:/a/b", "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_")


@pytest.mark.parametrize("interface", [SECOND, FIRST])
@pytest.mark.parametrize("place", ["a/b/", "a/", ""])
def test_a_control_group_limits_memory(tmp_path: Path, place: str, interface: tuple[str, ...]) -> None:
    group, top, limit, used, _ = interface
    files = {f"{top}/{place}memory.{limit}": 4_000_000, f"{top}/{place}memory.{used}": 1_000_000}
    assert process_memory(system(tmp_path, group, files)) == DeviceMemory(total=4_000_000, free=3_000_000)


@pytest.mark.parametrize("interface", [SECOND, FIRST])
def test_files_that_were_read_leave_memory_free(tmp_path: Path, interface: tuple[str, ...]) -> None:
    """A model's file as large as what is left of the limit would leave nothing for keys and values."""
    group, top, limit, used, prefix = interface
    stat = f"anon 1000000\n{prefix}inactive_file 2500000\n{prefix}active_file 400000\nslab 9"
    files = {f"{top}/memory.{limit}": 4_000_000, f"{top}/memory.{used}": 3_990_000, f"{top}/memory.stat": stat}
    assert process_memory(system(tmp_path, group, files)) == DeviceMemory(total=4_000_000, free=2_910_000)


@pytest.mark.parametrize("interface", [SECOND, FIRST])
def test_a_limit_counts_where_little_is_shown_of_groups(tmp_path: Path, interface: tuple[str, ...]) -> None:
    group, top, limit, used, _ = interface
    root = system(tmp_path, group, {f"{top}/memory.{limit}": 4_000_000})
    assert process_memory(root) == DeviceMemory(total=4_000_000, free=4_000_000)
    (root / top / f"memory.{used}").write_text("1000000\n")
    (root / "proc/self/cgroup").unlink()
    assert process_memory(root) == DeviceMemory(total=4_000_000, free=3_000_000)


def test_without_a_limit_memory_is_the_machines(tmp_path: Path) -> None:
    whole = DeviceMemory(total=8000 << 10, free=6000 << 10)
    for number, limit in enumerate(("max", 1 << 62)):
        files = {"sys/fs/cgroup/a/b/memory.max": limit, "sys/fs/cgroup/a/b/memory.current": 1_000_000}
        assert process_memory(system(tmp_path / str(number), "0::/a/b", files)) == whole
