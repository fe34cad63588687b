"""Make random grouped matrices of every packed kind, for all tests of them."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix

# fmt: off
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
"""The quantiles of a normal distribution that bitsandbytes' NF4 stands for."""
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of MXFP4 and NVFP4."""
# fmt: on

#: It maps the name of a kind to the bits of its codes, and the levels that they stand for.
KINDS: Final[dict[str, tuple[int, tuple[float, ...] | None]]] = {
    **{f"{bits} bits": (bits, None) for bits in (1, 2, 3, 4, 5, 6, 7, 8)},
    "int8": (8, tuple(float(number) for number in range(-128, 128))),
    "nf4": (4, NF4),
    "e2m1": (4, E2M1),
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def random_codes(
    kind: str, rows: int, cols: int, group_size: int, generator: torch.Generator, *, order: bool = False
) -> GroupedMatrix:
    """Make uniform codes, with float16 scales of either sign and zero points, which packing keeps as they are."""
    bits, levels = KINDS[kind]
    shape = (rows, -(-cols // group_size))
    scales = (torch.randn(shape, generator=generator) * 0.01).half().float()
    zeros = torch.randint(0, 1 << bits, shape, generator=generator)
    return GroupedMatrix(
        codes=torch.randint(0, 1 << bits, (rows, cols), generator=generator, dtype=torch.uint8),
        scales=scales,
        minima=None if levels is not None else -zeros * scales,
        group_size=group_size,
        levels=None if levels is None else torch.tensor(levels),
        order=torch.randperm(cols, generator=generator) if order else None,
        bits=bits,
    )


def quantized(weight: Tensor, *, bits: int = 4, group_size: int = 32, order: Tensor | None = None) -> GroupedMatrix:
    """Return the nearest codes to a matrix, with minima; stored columns are in an order if one is given."""
    rows, cols = weight.shape
    assert cols % group_size == 0
    values = (weight if order is None else weight[:, order]).float().view(rows, -1, group_size)
    low, high = values.amin(2), values.amax(2)
    scales = ((high - low) / ((1 << bits) - 1)).clamp_min(1e-8)
    codes = ((values - low[:, :, None]) / scales[:, :, None]).round().to(torch.uint8)
    return GroupedMatrix(
        codes=codes.view(rows, cols), scales=scales, minima=low, group_size=group_size, order=order, bits=bits
    )
