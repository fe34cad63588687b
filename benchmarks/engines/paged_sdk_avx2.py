"""Run this project as on a processor with AVX2 and neither AVX-512 nor VNNI, such as AMD's before Zen 4."""

from __future__ import annotations

import os
import sys
from unittest import mock

from benchmarks.engines import paged_sdk
from benchmarks.protocol import EngineSettings

__all__ = ["Engine"]


class Engine(paged_sdk.Engine):
    """Hides better instruction sets from the native library, torch and oneDNN before anything loads them."""

    REQUIREMENTS = ()

    def __init__(self, settings: EngineSettings) -> None:
        assert "torch" not in sys.modules
        os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        from paged_sdk.kernels.native import library

        levels = library.available_levels()
        with mock.patch.object(library, "available_levels", return_value=levels[levels.index("avx2") :]):
            loaded = library.load()
        assert loaded is not None
        assert loaded.isa == "avx2"
        super().__init__(settings)
