"""Builds the native CPU kernels: one plain shared library, its kernels compiled once per instruction set.

Everything else is in pyproject.toml. The library is optional: without a compiler the install goes on, and the package
uses its torch path. The environment may say otherwise:

- ``PAGED_REQUIRE_KERNELS=1``: what cannot be compiled ends the build. For wheels that are given to others.
- ``PAGED_TARGET``, such as ``aarch64-linux`` or ``x86_64-windows``: what ``CC``, ``CXX`` and ``LDCXXSHARED`` compile
  for, where that is not this machine.
- ``PAGED_SANITIZE=1``: an instrumented library, for ``make sanitize``.
"""

import os
import platform
import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from distutils.ccompiler import new_compiler  # setuptools' own copy
from distutils.errors import CompileError
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/paged_sdk/kernels/native")
SOURCES = PACKAGE / "csrc"
NAMES = runpy.run_path(str(PACKAGE / "sources.py"))
SOURCES_HASH = NAMES["sources_hash"](SOURCES)

# -ffp-contract=off: a compiler that fuses multiply and add where it likes would make a row's result depend on how many
# rows its tile has. Fused operations are written out.
FLAGS = [
    "-std=c++20", "-O3", "-g0", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-exceptions", "-fvisibility=hidden",
    "-Wall", "-Wno-uninitialized",
]  # fmt: skip
# -fno-tree-pre: GCC 12 otherwise keeps a second copy of a tile's integer sums in memory and stores to it in the inner
# loop: attention of 512 tokens over 4,000 keys took 18.8 ms with that and 9.5 ms without, on Zen 4.
FLAGS_OF_GCC = ["-fno-tree-pre", "-Wno-maybe-uninitialized", "-Wno-subobject-linkage"]

# For `make sanitize`: an instrumented library beside the ordinary one.
SANITIZE = ["-fsanitize=address,undefined"] if os.environ.get("PAGED_SANITIZE") == "1" else []
if SANITIZE:
    FLAGS += [*SANITIZE, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
SYSTEMS = {"win32": "windows", "darwin": "macos"}
HOST = platform.machine().lower()
if sys.platform == "darwin":
    HOST = NAMES["apple_machine"](os.environ.get("ARCHFLAGS", ""), HOST)
TARGET = os.environ.get("PAGED_TARGET") or f"{HOST}-{SYSTEMS.get(sys.platform, sys.platform)}"
MACHINE, _, SYSTEM = TARGET.partition("-")
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(MACHINE, MACHINE)
FLAGS_OF_PYTHON = (sysconfig.get_config_var("CFLAGS") or "").split() if sys.platform == "darwin" else []
# A universal Python's own options have two of these, which setuptools leaves out where one is given.
ARCH = ["-arch", {"aarch64": "arm64"}.get(MACHINE, MACHINE)] if "-arch" in FLAGS_OF_PYTHON else []
LIBRARY = NAMES["library_name"](on_windows=SYSTEM == "windows")

# Table of kernels -> flags of its instruction set; dispatch.cpp lists the same tables.
LEVELS = {"kPortableKernels": []}
if MACHINE == "x86_64":
    LEVELS |= {
        "kAvx2Kernels": AVX2,
        "kAvxVnniKernels": [*AVX2, "-mavxvnni"],
        "kAvx512Kernels": AVX512,
        "kAvx512Bf16Kernels": [*AVX512, "-mavx512bf16"],
        "kAmxKernels": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    }
if MACHINE == "aarch64":
    LEVELS = {
        "kPortableKernels": ["-march=armv8-a"],  # said outright: Apple's compiler goes further by itself
        "kNeonDotProductKernels": ["-march=armv8.2-a+dotprod"],
        "kNeonI8mmKernels": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
    }


def compiler_of_windows():
    """Return a compiler that takes GCC's options: ``CXX``, or the Clang of the package ziglang, with its own headers
    and libraries.

    Microsoft's knows neither the options nor the vectors that the kernels are written in, and GCC misplaces vectors of
    32 and 64 bytes on the stack there.
    """
    given = os.environ.get("CXX")
    if given is None and find_spec("ziglang") is None:
        raise CompileError("there is no compiler: set CXX to a Clang, or install ziglang")
    # Without a target it would compile for the very processor that it runs on.
    command = [given] if given else [sys.executable, "-m", "ziglang", "c++", "-target", f"{MACHINE}-windows-gnu"]
    compiler = new_compiler(compiler="unix")
    compiler.set_executables(
        compiler_so=command,
        compiler_so_cxx=command,
        linker_so=[*command, "-shared"],
        linker_so_cxx=[*command, "-shared"],
    )
    return compiler


def is_clang(command):
    """Tell whether a compiler is Clang, which refuses options of GCC's."""
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:  # what compiles next says so
        return False
    return "clang" in told.stdout


class BuildKernels(build_ext):
    """Compiles every source, kernels.cpp once per instruction set, and links them into one library."""

    def get_ext_filename(self, fullname):
        """No Python module, so no ABI tag: ctypes loads it by this name."""
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext):
        if sys.platform == "win32":
            self.compiler = compiler_of_windows()
        temp = Path(self.build_temp)
        jobs = [(source, temp, []) for source in ext.sources if not source.endswith("kernels.cpp")]
        kernels = str(SOURCES / "kernels.cpp")
        jobs += [(kernels, temp / table, [f"-DPAGED_TABLE={table}", *flags]) for table, flags in LEVELS.items()]
        general = [*FLAGS, *ARCH, *([] if is_clang(self.compiler.compiler_so_cxx) else FLAGS_OF_GCC)]
        if SYSTEM == "windows":
            general = [flag for flag in general if flag not in ("-fPIC", "-pthread")]

        def compile_one(job):
            source, directory, flags = job
            flags = [*general, *flags, f'-DPAGED_SOURCES="{SOURCES_HASH}"']
            return self.compiler.compile([source], output_dir=str(directory), extra_postargs=flags)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, jobs) for name in names]
        threads = [] if SYSTEM == "windows" else ["-pthread"]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), target_lang="c++", extra_postargs=[*threads, *ARCH, *SANITIZE]
        )


class KernelWheel(bdist_wheel):
    """Tags the wheel by what is in it: the library depends on the platform and not on the Python version, and without
    the library nothing depends on either.
    """

    def get_tag(self):
        built = any(Path(self.bdist_dir).rglob(LIBRARY))
        return ("py3", "none", super().get_tag()[2] if built else "any")


setup(
    ext_modules=[
        Extension(
            "paged_sdk.kernels.native.libpaged_kernels",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in (*sorted(SOURCES.glob("*.h")), PACKAGE / "sources.py")],
            language="c++",
            optional=os.environ.get("PAGED_REQUIRE_KERNELS") != "1",
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
)
