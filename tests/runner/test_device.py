"""What "auto" stands for as dtype, by what the processor and the native library offer."""

from __future__ import annotations

import ctypes

import pytest
import torch

from paged_sdk.kernels.native import library
from paged_sdk.runner.device import choose_dtype

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
