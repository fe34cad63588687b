"""Check an installed wheel, and run the demo with it: python -I wheel_check.py DEMO [without-kernels]

`-I` keeps the checkout out of the way, whichever directory this is started in. cibuildwheel runs it for every wheel and
version of Python, and test_packaging.py for the wheel of this machine.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import paged_sdk
from paged_sdk.kernels.native import library

LEVELS: Final = {
    "x86_64": ("amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "portable"),
    "aarch64": ("neon_i8mm", "neon_dotprod", "portable"),
}
"""Processor -> the instruction-set levels that a wheel for it has, whatever the machine here can run."""


def levels_of(file: Path) -> tuple[str, ...]:
    """Return the names of all levels that a native library has."""
    name_of = ctypes.CDLL(str(file)).paged_level_name
    name_of.argtypes, name_of.restype = (ctypes.c_int32,), ctypes.c_char_p
    names: list[str] = []
    while (name := name_of(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def check(*, with_kernels: bool) -> None:
    """Check what is installed, and say what it is."""
    package = Path(paged_sdk.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not of the environment {sys.prefix}"
    assert (package / "py.typed").is_file()
    assert (package / "server" / "page" / "index.html").is_file()
    assert not list(package.rglob("*.cpp")), "a wheel needs no sources"
    loaded = library.load()
    print(f"paged_sdk {version('paged-sdk')} in {package}, {loaded.isa if loaded else library.why_not()}")
    if not with_kernels:
        assert loaded is None
        return
    assert loaded is not None, library.why_not()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    assert levels_of(library._PATH) == LEVELS[machine]


def main(demo: str, *options: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check(with_kernels="without-kernels" not in options)
    sys.argv = [demo]
    runpy.run_path(demo, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
