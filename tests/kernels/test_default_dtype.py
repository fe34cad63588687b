"""Kernels compute in float32, whatever an application has made torch's default dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import library, needs_library, random_weight, workspace
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.hadamard import hadamard_quantize
from paged_sdk.kernels.native.grouped import decode_grouped
from paged_sdk.kernels.native.packed import decode_rows
from paged_sdk.kernels.native.quantize_groups import quantize_levels
from paged_sdk.kernels.native.routing import ExpertChoice, NativeRouting
from paged_sdk.kernels.quantized import quantize_groups as by_torch
from paged_sdk.kernels.quantized.quantize_groups import NF4_LEVELS
from paged_sdk.layers.rotary import RotaryEmbedding

pytestmark = needs_library

_DRAWN: Final = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
# Numbers that bfloat16 would round.
_ROPE: Final = RopeConfig(rotary_dim=8, theta=10_000.0, inv_freq_divisors=(1.001, 1.1, 3.003, 8.7))
_PACKED: Final = random_weight(8, 16, 64, torch.Generator().manual_seed(0))[0]
_CALLS: Final[dict[str, Callable[[], Tensor]]] = {
    "a choice of experts": lambda: NativeRouting(workspace(), ExpertChoice(num_experts=64, num_selected=4))(_DRAWN)[0],
    "scales of groups": lambda: quantize_levels(library(), _DRAWN, NF4_LEVELS).scales,
    "groups of a matrix": lambda: decode_grouped(library(), quantize_levels(library(), _DRAWN, NF4_LEVELS)),
    "levels by torch": lambda: by_torch.quantize_levels(_DRAWN, NF4_LEVELS).decoded(),
    "rounded to int8": lambda: hadamard_quantize(_DRAWN)[1],
    "frequencies": lambda: RotaryEmbedding(_ROPE, device=torch.device("cpu")).at(torch.arange(9)).cosines,
    "rows of a matrix": lambda: decode_rows(library(), _PACKED, torch.tensor([3, 0])),
}


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    """Return what sets the default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", _CALLS)
def test_the_default_dtype_changes_nothing(name: str, set_default: Callable[[torch.dtype], None]) -> None:
    expected = _CALLS[name]()
    for dtype in (torch.float64, torch.bfloat16):
        set_default(dtype)
        found = _CALLS[name]()
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
