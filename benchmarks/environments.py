"""Make each peer's own virtual environment, on request.

python -m benchmarks.environments [ENGINE ...]          all peers by default
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.paths import cache_directory
from benchmarks.worker import engine_class

__all__ = ["ENGINES", "OWN", "installed_engines", "python_of"]

_FILES: Final = (Path(__file__).parent / "engines").glob("[!_]*.py")

OWN: Final = "paged_sdk"
"""The engine that is compared with its peers; other ways to run it begin with the same name and are no peers."""

ENGINES: Final = tuple(sorted((path.stem for path in _FILES), key=lambda name: (not name.startswith(OWN), name)))

# Written last, with what was installed: an environment without it is not whole.
_MARKER: Final = "installed.txt"


def installed_engines() -> list[str]:
    """Return this project, and the peers whose environments exist as their files now demand them."""
    return [name for name in ENGINES if _is_installed(name)]


def python_of(engine: str) -> Path:
    """Return the interpreter that runs an engine."""
    if not engine_class(engine).REQUIREMENTS:
        return Path(sys.executable)
    return _directory(engine) / "bin" / "python"


def _directory(engine: str) -> Path:
    return cache_directory("peers") / engine


def _is_installed(engine: str) -> bool:
    requirements = engine_class(engine).REQUIREMENTS
    marker = _directory(engine) / _MARKER
    return not requirements or (marker.exists() and marker.read_text().split() == list(requirements))


def _install(engine: str) -> None:
    requirements, unwanted = engine_class(engine).REQUIREMENTS, engine_class(engine).UNWANTED
    subprocess.run([sys.executable, "-m", "venv", _directory(engine)], check=True)
    pip = [str(python_of(engine)), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *requirements], check=True)
    if unwanted:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *unwanted], check=True)
    (_directory(engine) / _MARKER).write_text("\n".join(requirements))


def main(names: list[str]) -> int:
    """Install peers; one that fails does not stop the others."""
    unknown = set(names) - set(ENGINES)
    if unknown:
        raise SystemExit(f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    failed = []
    for name in names or ENGINES:
        if _is_installed(name):
            print(f"{name}: is installed")
            continue
        print(f"{name}: installing {' '.join(engine_class(name).REQUIREMENTS)}", flush=True)
        try:
            _install(name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
