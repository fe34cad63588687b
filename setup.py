"""Builds the native CPU kernels: one plain shared library, its kernels compiled once per instruction set.

Everything else is in pyproject.toml. The library is optional: without a compiler the install goes on, and the package
uses its torch path.
"""

import os
import platform
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/paged_sdk/kernels/native")
SOURCES = PACKAGE / "csrc"
SOURCES_HASH = runpy.run_path(str(PACKAGE / "sources.py"))["sources_hash"](SOURCES)

# -fno-tree-pre: GCC 12 otherwise keeps a second copy of a tile's integer sums in memory and stores to it in the inner
# loop: attention of 512 tokens over 4,000 keys took 18.8 ms with that and 9.5 ms without, on Zen 4.
# -ffp-contract=off: a compiler that fuses multiply and add where it likes would make a row's result depend on how many
# rows its tile has. Fused operations are written out.
FLAGS = [
    "-std=c++20", "-O3", "-g0", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-tree-pre", "-fno-exceptions",
    "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-subobject-linkage",
    "-Wno-unknown-warning-option",
]  # fmt: skip

# For `make sanitize`: an instrumented library beside the ordinary one.
SANITIZE = ["-fsanitize=address,undefined"] if os.environ.get("PAGED_SANITIZE") == "1" else []
if SANITIZE:
    FLAGS += [*SANITIZE, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
# The machine that the library is for: `make test-aarch64` builds it for another one than this.
MACHINE = os.environ.get("PAGED_MACHINE") or platform.machine()
# Table of kernels -> flags of its instruction set; dispatch.cpp lists the same tables.
LEVELS = {"kPortableKernels": []}
if MACHINE in ("x86_64", "AMD64"):
    LEVELS |= {
        "kAvx2Kernels": AVX2,
        "kAvxVnniKernels": [*AVX2, "-mavxvnni"],
        "kAvx512Kernels": AVX512,
        "kAvx512Bf16Kernels": [*AVX512, "-mavx512bf16"],
    }
if MACHINE in ("aarch64", "arm64"):
    LEVELS = {
        "kPortableKernels": ["-march=armv8-a"],  # said outright: Apple's compiler goes further by itself
        "kNeonDotProductKernels": ["-march=armv8.2-a+dotprod"],
        "kNeonI8mmKernels": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
    }


class BuildKernels(build_ext):
    """Compiles every source, kernels.cpp once per instruction set, and links them into libpaged_kernels.so."""

    def get_ext_filename(self, fullname):
        """No Python module, so no ABI tag: ctypes loads it by this name."""
        return os.path.join(*fullname.split(".")[:-1], "libpaged_kernels.so")

    def build_extension(self, ext):
        temp = Path(self.build_temp)
        jobs = [(source, temp, []) for source in ext.sources if not source.endswith("kernels.cpp")]
        kernels = str(SOURCES / "kernels.cpp")
        jobs += [(kernels, temp / table, [f"-DPAGED_TABLE={table}", *flags]) for table, flags in LEVELS.items()]

        def compile_one(job):
            source, directory, flags = job
            flags = [*FLAGS, *flags, f'-DPAGED_SOURCES="{SOURCES_HASH}"']
            return self.compiler.compile([source], output_dir=str(directory), extra_postargs=flags)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [name for names in pool.map(compile_one, jobs) for name in names]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), target_lang="c++", extra_postargs=["-pthread", *SANITIZE]
        )


class PlatformWheel(bdist_wheel):
    """The library depends on the platform and not on the Python version."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "paged_sdk.kernels.native.libpaged_kernels",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in (*sorted(SOURCES.glob("*.h")), PACKAGE / "sources.py")],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
