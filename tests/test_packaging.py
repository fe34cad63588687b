"""Build what is given to users, the sdist and the wheel that pip makes of it, and use it as they do: `make
test-packaging`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

from paged_sdk.kernels.native.sources import library_name

ROOT: Final = Path(__file__).parents[1]
LIBRARY: Final = PurePosixPath("paged_sdk/kernels/native", library_name(on_windows=sys.platform == "win32"))
TREES: Final = ("benchmarks", "docs", "documentation", "examples", "src", "stubs", "tests")
FILES: Final = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
)
NOT_SOURCES: Final = shutil.ignore_patterns("__pycache__", "*.so", "*.dll", "*.egg-info", ".*")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3000),  # two builds of the kernels take some 8 minutes of processor time
    pytest.mark.skipif(sys.platform == "win32", reason="runs the programs of a POSIX environment"),
]


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a program far from the checkout; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PAGED_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | dict(env or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what is under version control: a listing of an earlier build would go into the sdist."""
    copy = tmp_path_factory.mktemp("sources")
    for tree in TREES:
        shutil.copytree(ROOT / tree, copy / tree, ignore=NOT_SOURCES)
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    build = "import setuptools.build_meta, sys; setuptools.build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, directory, cwd=sources)
    (made,) = directory.iterdir()
    return made


def make_wheel(sdist: Path, directory: Path, env: Mapping[str, str]) -> Path:
    """Have pip make a wheel of the sdist, in an environment of its own, as a user's pip does."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir")
    run(*pip, "-w", directory, sdist, cwd=sdist.parent, env=env)
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(sdist, tmp_path_factory.mktemp("wheel"), {"PAGED_REQUIRE_KERNELS": "1"})


@pytest.fixture(scope="module")
def wheel_without_compiler(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    no_compiler = dict.fromkeys(("CC", "CXX"), shutil.which("false") or "false")
    return make_wheel(sdist, tmp_path_factory.mktemp("pure_wheel"), no_compiler)


def install(wheel: Path, directory: Path) -> Path:
    """Install a wheel into an empty environment; return the directory of its programs.

    What it depends on comes from the environment of the tests: to install torch once more takes minutes and a gigabyte.
    A .pth file adds its packages and not its own .pth files, by which the checkout is installed.
    """
    run(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    programs = directory / "bin"
    run(programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=directory)
    names = ("purelib", "platlib")
    there = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})["purelib"]
    Path(there, "dependencies.pth").write_text("\n".join({sysconfig.get_paths()[name] for name in names}))
    return programs


def demo_of(sdist: Path, directory: Path) -> tuple[Path, Path]:
    """Unpack the sdist; return the check of wheels and the demo, which are outside of the checkout then."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (top,) = directory.iterdir()
    return top / "tests" / "wheel_check.py", top / "examples" / "demo.py"


def test_the_sdist_has_all_sources_and_nothing_else(sources: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        there = {PurePosixPath(*PurePosixPath(file.name).parts[1:]) for file in archive if file.isfile()}
    made = {PurePosixPath("PKG-INFO"), PurePosixPath("setup.cfg")}
    made |= {file for file in there if file.parts[:2] == ("src", "paged_sdk.egg-info")}
    expected = {PurePosixPath(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    expected = {path for path in expected if "egg-info" not in str(path)}
    assert there - made == expected


def test_the_wheel_has_the_package_and_the_library_and_nothing_else(sources: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = {PurePosixPath(name) for name in archive.namelist()}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert "\nRequires-Dist: torch" in archive.read(metadata).decode()
    package = sources / "src" / "paged_sdk"
    expected = {PurePosixPath(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    expected = {path for path in expected if "csrc" not in path.parts} | {LIBRARY}
    about = {path for path in there if path.parts[0].endswith(".dist-info")}
    assert there - about == expected
    names = {str(PurePosixPath(*path.parts[1:])) for path in about}
    assert names == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def test_the_wheel_is_for_every_python_of_this_platform(wheel: Path) -> None:
    tag = "-".join(wheel.stem.split("-")[2:])
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert tag == f"py3-none-{system}"
    assert platform.machine() in tag


def test_the_library_needs_neither_torch_nor_openmp(wheel: Path, tmp_path: Path) -> None:
    """Linked to another's runtime it would fall with its versions, and two OpenMP runtimes in a process are one too
    many.
    """
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(str(LIBRARY), tmp_path)
    lines = run("objdump", "-p", library, cwd=tmp_path).splitlines()
    needed = {line.split()[1].split(".")[0] for line in lines if line.split()[:1] == ["NEEDED"]}
    assert needed <= {"libstdc++", "libm", "libc", "libgcc_s", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_the_installed_wheel_runs_the_demo_and_the_doctor(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    programs = install(wheel, tmp_path / "env")
    check, demo = demo_of(sdist, tmp_path / "unpacked")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    printed = run(programs / "python", "-I", check, demo, cwd=elsewhere)
    assert "Native CPU kernels: " in printed
    assert "Figures by turn" in printed
    report = json.loads(run(programs / "paged-sdk", "doctor", "--json", cwd=elsewhere))["machine"]
    assert report["kernel_level"] == report["kernel_levels"][0]
    assert report["why_no_kernels"] is None
    assert not list(elsewhere.iterdir())


def test_without_a_compiler_it_installs_and_runs_on_torch(
    wheel_without_compiler: Path, sdist: Path, tmp_path: Path
) -> None:
    assert wheel_without_compiler.name.endswith("-py3-none-any.whl")
    programs = install(wheel_without_compiler, tmp_path / "env")
    check, demo = demo_of(sdist, tmp_path / "unpacked")
    printed = run(programs / "python", "-I", check, demo, "without-kernels", cwd=tmp_path)
    assert "Native CPU kernels are off, torch operations are used" in printed
    assert "was installed without a C++ compiler" in printed
    assert "Figures by turn" in printed


def test_what_has_to_have_kernels_does_not_build_without_a_compiler(sdist: Path, tmp_path: Path) -> None:
    no_compiler = dict.fromkeys(("CC", "CXX"), shutil.which("false") or "false")
    with pytest.raises(AssertionError, match="returned non-zero exit status"):
        make_wheel(sdist, tmp_path, no_compiler | {"PAGED_REQUIRE_KERNELS": "1"})
