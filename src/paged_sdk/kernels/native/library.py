"""Finds and loads the native library, and logs its instruction set or why it cannot be used."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

import torch

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.sources import library_name, sources_hash
from paged_sdk.kernels.native.structures import (
    Decoder,
    Experts,
    HeadProduct,
    Linear,
    Norm,
    Ranks,
    Rows,
)
from paged_sdk.kernels.native.structures_attention import Attention
from paged_sdk.kernels.native.structures_packing import DecodeGrouped, Dense, Grouped, Quantize, QuantizeGroups
from paged_sdk.kernels.native.structures_recurrent import GatedDelta, Mamba2, ShortConv
from paged_sdk.kernels.native.structures_routing import Route
from paged_sdk.kernels.native.structures_sampling import Argmax, Draw, Logprobs
from paged_sdk.logs import get_logger
from paged_sdk.system.processors import usable_processors

__all__ = ["NativeLibrary", "Workspace", "available_levels", "load", "open_library", "why_not"]

_PATH = Path(__file__).with_name(library_name(on_windows=sys.platform == "win32"))
_REBUILD = "install the package again, or build it with python setup.py build_ext --inplace"

# The x86 levels with dot products of bfloat16 pairs.
_MULTIPLIES_PAIRS: Final = ("amx", "avx512_bf16")

# bfloat16 compared with float32 on AVX2, two threads, SmolLM2-135M in Q4_1: 1.2 to 1.3 times the tokens per second, and
# twice as many after 4,000 tokens. NEON levels were not timed; the portable level widens one number at a time.
_AS_FAST_IN_BFLOAT16: Final = ("amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2")

_log = get_logger(__name__)


class NativeLibrary:
    """Binds the loaded library to one instruction-set level. Immutable, and shared by all callers of :func:`load`.

    :ivar isa: name of the level: ``amx``, ``avx512_bf16``, ``avx512_vnni``, ``avx_vnni``, ``avx2``,
        ``neon_i8mm``, ``neon_dotprod`` or ``portable``
    :ivar level: the level's number in the library; 0 is the best
    """

    def __init__(self, functions: ctypes.CDLL, *, isa: str, level: int) -> None:
        self.functions = functions
        self.isa = isa
        self.level = level

    @property
    def suits_bfloat16(self) -> bool:
        """Return whether bfloat16 layers are as fast as float32 ones: they read half as much, and widening is free."""
        return self.isa in _AS_FAST_IN_BFLOAT16

    @property
    def max_interleaved(self) -> int:
        """Return the maximum number of elements per head that a rotary embedding with interleaved pairs rotates."""
        return int(self.functions.paged_max_interleaved())

    @property
    def multiplies_pairs(self) -> bool:
        """Return whether bfloat16 attention uses the CPU's dot products of bfloat16 pairs."""
        return self.isa in _MULTIPLIES_PAIRS


class Workspace:
    """Owns the scratch memory of native calls, which grows to the largest need, and sets their number of threads.

    A workspace may be used by one call at a time, so each engine has its own.

    :param library: the loaded library
    :param num_threads: threads per call, from the pool that all models of the process share; default: torch's number,
        at most the usable CPUs
    :ivar handle: the workspace of the C interface
    """

    def __init__(self, library: NativeLibrary, *, num_threads: int | None = None) -> None:
        threads = min(torch.get_num_threads(), usable_processors()) if num_threads is None else num_threads
        if threads < 1:
            raise ConfigError.of("num_threads", num_threads, "an int >= 1")
        self.library = library
        self.num_threads = threads
        self.handle: int | None = library.functions.paged_workspace_new()
        if self.handle is None:
            raise MemoryError("no memory for a workspace of the native kernels")

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.library.functions.paged_workspace_delete(self.handle)
            self.handle = None


def _declare(functions: ctypes.CDLL) -> None:
    functions.paged_level_name.argtypes = (c_int32,)
    functions.paged_level_name.restype = c_char_p
    functions.paged_level_runs_here.argtypes = (c_int32,)
    functions.paged_max_interleaved.argtypes = ()
    functions.paged_max_interleaved.restype = c_int32
    functions.paged_workspace_new.argtypes = ()
    functions.paged_workspace_new.restype = c_void_p
    functions.paged_workspace_delete.argtypes = (c_void_p,)
    functions.paged_workspace_delete.restype = None
    functions.paged_packed_bytes.argtypes = (c_int32, c_int32, c_int32)
    functions.paged_packed_bytes.restype = c_int64
    functions.paged_pack.argtypes = (c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32)
    functions.paged_pack.restype = None
    functions.paged_pack_grouped.argtypes = (POINTER(Grouped),)
    functions.paged_pack_grouped.restype = None
    functions.paged_decode_grouped.argtypes = (POINTER(DecodeGrouped),)
    functions.paged_decode_grouped.restype = None
    functions.paged_pack_dense.argtypes = (c_int32, POINTER(Dense))
    functions.paged_gains_in_hadamard.argtypes = (c_int32, c_int32)
    functions.paged_gains_in_hadamard.restype = c_int32
    functions.paged_linear.argtypes = (c_int32, POINTER(Linear))
    functions.paged_head_product.argtypes = (c_int32, POINTER(HeadProduct))
    functions.paged_experts.argtypes = (c_int32, POINTER(Experts))
    functions.paged_route.argtypes = (c_int32, POINTER(Route))
    functions.paged_attention.argtypes = (c_int32, POINTER(Attention))
    functions.paged_decoder.argtypes = (c_int32, POINTER(Decoder))
    functions.paged_quantize.argtypes = (c_int32, POINTER(Quantize))
    functions.paged_quantize_groups.argtypes = (c_int32, POINTER(QuantizeGroups))
    functions.paged_rows.argtypes = (c_int32, POINTER(Rows))
    functions.paged_norm.argtypes = (c_int32, POINTER(Norm))
    functions.paged_argmax.argtypes = (c_int32, POINTER(Argmax))
    functions.paged_draw.argtypes = (c_int32, POINTER(Draw))
    functions.paged_logprobs.argtypes = (c_int32, POINTER(Logprobs))
    functions.paged_short_conv.argtypes = (c_int32, POINTER(ShortConv))
    functions.paged_gated_delta.argtypes = (c_int32, POINTER(GatedDelta))
    functions.paged_mamba2.argtypes = (c_int32, POINTER(Mamba2))
    functions.paged_ranks_bytes.argtypes = (c_int32, c_int64)
    functions.paged_ranks_bytes.restype = c_int64
    functions.paged_ranks_sum.argtypes = (POINTER(Ranks), c_void_p, c_int64)
    functions.paged_ranks_sum.restype = None
    functions.paged_ranks_gather.argtypes = (POINTER(Ranks), c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    functions.paged_ranks_gather.restype = None
    functions.paged_ranks_end.argtypes = (POINTER(Ranks),)
    functions.paged_ranks_end.restype = None
    functions.paged_collapse_huge_page.argtypes = (c_void_p,)
    functions.paged_collapse_huge_page.restype = c_int32
    functions.paged_sources.argtypes = ()
    functions.paged_sources.restype = c_char_p


def open_library(path: Path) -> ctypes.CDLL:
    """Open a build of the library, without checking that it was built from the installed sources.

    :raises OSError: the library cannot be loaded
    :raises AttributeError: a function is missing: the library is of another version
    """
    functions = ctypes.CDLL(str(path))
    _declare(functions)
    return functions


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """Open the shared library; return None and the reason if it cannot be used."""
    if not _PATH.exists():
        return None, f"{_PATH.name} was not built: the package was installed without a C++ compiler"
    try:
        functions = open_library(_PATH)
    except OSError as exc:
        return None, f"{_PATH.name} cannot be loaded: {exc}"
    except AttributeError as exc:
        return None, f"{_PATH.name} is another version's ({exc}): {_REBUILD}"
    expected = sources_hash()
    # A structure with another layout would crash the process or give wrong results.
    if expected and functions.paged_sources().decode() != expected:
        return None, f"{_PATH.name} was built from other sources than are installed: {_REBUILD}"
    return functions, ""


@cache
def available_levels() -> tuple[str, ...]:
    """Return the instruction-set levels that this machine can run, best first; empty without the library."""
    functions, _ = _open()
    names: list[str] = []
    if functions is not None:
        level = 0
        while (name := functions.paged_level_name(level)) is not None:
            if functions.paged_level_runs_here(level):
                names.append(name.decode())
            level += 1
    return tuple(names)


@cache
def load(isa: str | None = None) -> NativeLibrary | None:
    """Load the native library; return None, with the reason in the log and :func:`why_not`, if it cannot be used.

    :param isa: an instruction-set level of :func:`available_levels`; default: the best
    :raises ConfigError: this machine cannot run that level
    """
    functions, reason = _open()
    if functions is None:
        _log.info("Native CPU kernels are off, torch operations are used: %s", reason)
        return None
    names = available_levels()
    name = names[0] if isa is None else isa
    if name not in names:
        raise ConfigError.of("isa", isa, f"one of {', '.join(names)}")
    level = 0
    while functions.paged_level_name(level).decode() != name:
        level += 1
    _log.info("Native CPU kernels: %s", name)
    return NativeLibrary(functions, isa=name, level=level)


def why_not() -> str | None:
    """Return why :func:`load` returns None, or None if it returns a library."""
    return _open()[1] or None
