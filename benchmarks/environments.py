"""Make each peer's own virtual environment, on request.

python -m benchmarks.environments [--isa SET] [ENGINE ...]          all peers by default
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.machine import instruction_sets
from benchmarks.paths import cache_directory
from benchmarks.worker import engine_class

__all__ = ["ENGINES", "OWN", "engines_for", "installed_engines", "python_of"]

_FILES: Final = (Path(__file__).parent / "engines").glob("[!_]*.py")

OWN: Final = "paged_sdk"
"""This project's engine. Names that begin with it are other ways to run it, not peers."""

ENGINES: Final = tuple(sorted((path.stem for path in _FILES), key=lambda name: (not name.startswith(OWN), name)))

# Written last, with the installed packages: an environment without it is incomplete.
_MARKER: Final = "installed.txt"


def installed_engines(isa: str | None = None) -> list[str]:
    """Return this project, and the peers whose environments exist and are up to date.

    :param isa: return only engines that can be limited to this instruction set; None: any engine
    """
    return [name for name in engines_for(isa) if _is_installed(name, isa)]


def engines_for(isa: str | None) -> tuple[str, ...]:
    """Return the engines that can be limited to an instruction set; None: all."""
    return ENGINES if isa is None else tuple(name for name in ENGINES if isa in engine_class(name).ISAS)


def python_of(engine: str, isa: str | None = None) -> Path:
    """Return the interpreter that runs an engine."""
    if not engine_class(engine).REQUIREMENTS:
        return Path(sys.executable)
    return _directory(engine, isa) / "bin" / "python"


def _directory(engine: str, isa: str | None) -> Path:
    built_for = isa if engine_class(engine).BUILT_FOR_ISA else None
    return cache_directory("peers") / (engine if built_for is None else f"{engine}-{built_for}")


def _is_installed(engine: str, isa: str | None) -> bool:
    requirements = engine_class(engine).REQUIREMENTS
    marker = _directory(engine, isa) / _MARKER
    return not requirements or (marker.exists() and marker.read_text().split() == list(requirements))


def _install(engine: str, isa: str | None) -> None:
    kind, directory = engine_class(engine), _directory(engine, isa)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip = [str(python_of(engine, isa)), "-m", "pip"]
    # A cached wheel built for another instruction set would have the same name.
    fresh = ["--no-cache-dir"] if kind.BUILT_FOR_ISA else []
    variables = kind.build_variables(instruction_sets()) if isa is None else kind.ISAS[isa]
    subprocess.run([*pip, "install", "--quiet", *fresh, *kind.REQUIREMENTS], check=True, env=os.environ | variables)
    if kind.UNWANTED:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *kind.UNWANTED], check=True)
    (directory / _MARKER).write_text("\n".join(kind.REQUIREMENTS))


def main(engines: list[str], isa: str | None = None) -> int:
    """Install peers; one that fails does not stop the others."""
    allowed = engines_for(isa)
    unknown = set(engines) - set(allowed)
    if unknown:
        among = "" if isa is None else f" that can be held to {isa}"
        names = ", ".join(sorted(unknown))
        raise SystemExit(f"no such engine{among}: {names}; there are {', '.join(allowed) or 'none'}")
    failed = []
    for name in engines or allowed:
        if _is_installed(name, isa):
            print(f"{name}: is installed")
            continue
        print(f"{name}: installing {' '.join(engine_class(name).REQUIREMENTS)}", flush=True)
        try:
            _install(name, isa)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    parser.add_argument("--isa", help="build the peers for this instruction set, avx2; default: the processor's best")
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    sys.exit(main(options.engines, options.isa))
