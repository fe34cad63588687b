"""Loading: levels, threads, and life without the library."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from native_weights import needs_library
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native import library
from paged_sdk.kernels.native.library import Workspace, available_levels, load, why_not
from paged_sdk.kernels.native.sources import SOURCES, apple_machine, sources_hash


@needs_library
def test_levels_end_with_the_portable_one_and_the_best_is_the_default() -> None:
    levels = available_levels()
    assert levels[-1] == "portable"
    best = load()
    assert best is not None
    assert best.isa == levels[0]
    for name in levels:
        loaded = load(name)
        assert loaded is not None
        assert loaded.isa == name
        assert load(name) is loaded


@needs_library
def test_an_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="isa = 'sse9'"):
        load("sse9")


@needs_library
def test_a_workspace_needs_threads() -> None:
    best = load()
    assert best is not None
    with pytest.raises(ConfigError, match="num_threads"):
        Workspace(best, num_threads=0)


@needs_library
def test_the_library_needs_no_openmp_runtime() -> None:
    """Its threads are its own (pool.h): another pool's would wait awake for them on the same cores."""
    assert b"libgomp" not in library._PATH.read_bytes()


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Have the library loaded anew, in the test and after it."""
    cached = (library._open, library.available_levels, library.load)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_without_the_library_it_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="paged_sdk"):
        patch.setattr(library, "_PATH", tmp_path / "libpaged_kernels.so")
        assert load() is None
        assert available_levels() == ()
        assert "was not built" in (why_not() or "")
        assert [record.message for record in caplog.records] == [
            f"Native CPU kernels are off, torch operations are used: {why_not()}"
        ]
        library._open.cache_clear()
        (tmp_path / "libpaged_kernels.so").write_bytes(b"no library")
        assert "cannot be loaded" in (why_not() or "")


@needs_library
@pytest.mark.usefixtures("unloaded")
def test_a_library_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its structures may lie otherwise: a library that was not built again once ended the process."""
    for path in SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert sources_hash(tmp_path) == sources_hash() != ""
    (tmp_path / "abi.h").write_text((SOURCES / "abi.h").read_text() + "\n")
    changed = sources_hash(tmp_path)
    assert changed != sources_hash()
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="paged_sdk"):
        patch.setattr(library, "sources_hash", lambda: changed)
        assert load() is None
        assert load() is None
    assert "was built from other sources than are installed: install the package again" in (why_not() or "")
    assert len(caplog.records) == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.usefixtures("unloaded")
def test_another_library_of_that_name_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int paged_level_name(int level) { return level; }\n")
    other = tmp_path / "libpaged_kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(other), str(tmp_path / "empty.c")], check=True)
    monkeypatch.setattr(library, "_PATH", other)
    assert load() is None
    assert "is another version's" in (why_not() or "")


def test_without_sources_any_build_is_taken(tmp_path: Path) -> None:
    """As in an installation that leaves them out."""
    assert sources_hash(tmp_path) == ""


@pytest.mark.parametrize(
    ("arch_flags", "expected"),
    [("", "arm64"), ("-arch x86_64", "x86_64"), ("-arch arm64 -arch x86_64", "arm64"), ("-arch  arm64 -O2", "arm64")],
)
def test_a_universal_python_builds_for_one_machine(arch_flags: str, expected: str) -> None:
    assert apple_machine(arch_flags, "arm64") == expected


def test_lines_of_the_sources_are_as_long_as_those_of_python() -> None:
    """No formatter looks at them."""
    assert list(SOURCES.glob("*.h"))
    for path in sorted(SOURCES.iterdir()):
        long = [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
        assert not long, (path.name, long)
