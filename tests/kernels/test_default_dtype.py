"""Native calls write float32, whatever an application has made torch's default dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import library, needs_library, random_weight, workspace
from paged_sdk.kernels.native.grouped import decode_grouped
from paged_sdk.kernels.native.packed import decode_rows
from paged_sdk.kernels.native.quantize_groups import quantize_levels
from paged_sdk.kernels.native.routing import ExpertChoice, NativeRouting
from paged_sdk.kernels.quantized.quantize_groups import NF4_LEVELS

pytestmark = needs_library

_DRAWN: Final = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
_PACKED: Final = random_weight(8, 16, 64, torch.Generator().manual_seed(0))[0]
_CALLS: Final[dict[str, Callable[[], Tensor]]] = {
    "a choice of experts": lambda: NativeRouting(workspace(), ExpertChoice(num_experts=64, num_selected=4))(_DRAWN)[0],
    "scales of groups": lambda: quantize_levels(library(), _DRAWN, NF4_LEVELS).scales,
    "groups of a matrix": lambda: decode_grouped(library(), quantize_levels(library(), _DRAWN, NF4_LEVELS)),
    "rows of a matrix": lambda: decode_rows(library(), _PACKED, torch.tensor([3, 0])),
}


@pytest.fixture
def in_float64() -> Iterator[Callable[[], None]]:
    """Return what makes float64 the default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", _CALLS)
def test_the_default_dtype_changes_nothing(name: str, in_float64: Callable[[], None]) -> None:
    expected = _CALLS[name]()
    in_float64()
    found = _CALLS[name]()
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)
