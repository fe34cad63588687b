"""Quantizes dense weights to grouped matrices with torch operations: the in-situ types that are not GGUF blocks.

Scales and minima of groups of 64 are rounded before codes are chosen, to float16 or (minima) to multiples of the scale,
so that packing them in 16 bits changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from paged_sdk.kernels.fp8 import F8E4M3_MAX
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.quantize import float_parts, weights_at_once

__all__ = [
    "FP4_LEVELS",
    "GROUP",
    "NF4_LEVELS",
    "between_levels",
    "quantize_affine",
    "quantize_fp8",
    "quantize_half_quadratic",
    "quantize_levels",
    "quantize_rows",
]

GROUP: Final = 64
"""Number of consecutive weights of a row that share a scale."""

#: The quantiles of a normal distribution, scaled to 1, with an exact zero: QLoRA, Dettmers et al., 2023, arXiv
#: 2305.14314, appendix E.
NF4_LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

#: bitsandbytes' 4-bit floats: a sign, two bits of exponent and one of mantissa, divided by 12.
FP4_LEVELS: Final = tuple(
    sign * number for sign in (1.0, -1.0) for number in (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
)

_SMALLEST: Final = 1e-7  # smallest scale: above the smallest float16 number, 6e-8, so that it does not round to zero
_WEIGHTS_AT_ONCE: Final = 1 << 18  # temporaries of 1 MiB, which stay in the cache

# Half-quadratic optimization (Badri & Shaji, 2023): the error's norm, the weight of its split, and how that grows.
_NORM: Final = 0.7
_SPLIT: Final = 10.0
_GROWTH: Final = 1.01
_ROUNDS: Final = 12  # after which the error of normal weights is within 0.02 % of that after 20


def quantize_affine(weight: Tensor, bits: int) -> GroupedMatrix:
    """Quantize with a scale and a minimum per 64 weights, as MLX does: the end of a group's range with the larger
    magnitude is exact, and zero has a code. If a least-squares fit to these codes has a smaller error, it is used.

    :param weight: ``[rows, cols]`` of a floating point dtype; in the other functions likewise
    :raises CheckpointError: a weight is NaN, Inf or of a magnitude above 32,768; in the other functions likewise
    """
    levels = float((1 << bits) - 1)

    def fit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = ((highest - lowest) / levels).clamp_min(_SMALLEST)
        is_low = lowest.abs() > highest.abs()
        edge = torch.where(is_low, lowest, highest)
        step = torch.where(is_low, step, -step)
        zero = (edge / step).round()
        scale = _half(torch.where(zero != 0, edge / torch.where(zero != 0, zero, 1.0), step))
        # Exact in float32, so that zero stays zero; if zero is outside the codes' range, the end of the range is kept.
        minimum = torch.where(zero.abs() <= levels, scale * zero, _half(edge))
        codes = _codes(x, scale, minimum, levels)
        best = _error(x, codes, scale, minimum)
        # x is about scale * code + minimum
        mean_code, mean = codes.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        spread = (codes - mean_code).square().sum(-1, keepdim=True)
        slope = ((codes - mean_code) * x).sum(-1, keepdim=True) / spread.clamp_min(1)
        own_scale, own_minimum = _half(slope), _half(mean - slope * mean_code)
        own_codes = _codes(x, own_scale, own_minimum, levels)
        is_better = (_error(x, own_codes, own_scale, own_minimum) < best) & (own_scale != 0)
        return (
            torch.where(is_better, own_codes, codes),
            torch.where(is_better, own_scale, scale),
            torch.where(is_better, own_minimum, minimum),
        )

    return _grouped(weight, bits, fit)


def quantize_half_quadratic(weight: Tensor, bits: int) -> GroupedMatrix:
    """Quantize with a scale and a zero point per 64 weights: the scale spans the group's range, and the zero point is
    optimized under a norm that tolerates outliers (half-quadratic quantization, HQQ, Badri & Shaji, 2023).
    """
    levels = float((1 << bits) - 1)

    def fit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = _half(((highest - lowest) / levels).clamp_min(_SMALLEST))
        inverse = scale.reciprocal()
        zero = -lowest * inverse
        best_zero, least, split = zero, torch.full_like(zero, torch.inf), _SPLIT
        for _ in range(_ROUNDS):
            codes = (x * inverse + zero).round_().clamp_(0, levels)
            error = x - (codes - zero) * scale
            size = error.abs()
            total = size.mean(-1, keepdim=True)
            best_zero, least = torch.where(total < least, zero, best_zero), torch.minimum(total, least)
            # The norm's proximal operator shrinks errors, small ones to zero.
            kept = (size - size.clamp_min(1e-12).pow(_NORM - 1) / split).clamp_min_(0).copysign_(error)
            zero = (codes - (x - kept) * inverse).mean(-1, keepdim=True)
            split *= _GROWTH
        minimum = _half(-best_zero * scale)
        return _codes(x, scale, minimum, levels), scale, minimum

    return _grouped(weight, bits, fit)


def quantize_levels(weight: Tensor, levels: tuple[float, ...]) -> GroupedMatrix:
    """Quantize to the nearest of 16 levels, scaled by the largest magnitude of 64 weights, as bitsandbytes does."""
    table = torch.tensor(levels, dtype=torch.float32, device=weight.device)
    between, numbers = between_levels(table)

    def fit(x: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = _half(x.abs().amax(-1, keepdim=True))
        ratio = x / torch.where(scale != 0, scale, 1.0)
        return numbers[torch.bucketize(ratio, between)], scale, None

    return _grouped(weight, 4, fit, levels=table)


def between_levels(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Sort levels; return the midpoints between neighbours, and the codes of the sorted levels, uint8."""
    ordered, numbers = levels.sort()
    return (ordered[1:] + ordered[:-1]) / 2, numbers.to(torch.uint8)


def quantize_rows(weight: Tensor) -> GroupedMatrix:
    """Quantize to int8 with one scale per row, whose largest magnitude becomes 127."""

    def fit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = (x / torch.where(scale != 0, scale, 1.0)).round_().clamp_(-127, 127) + 128
        return codes, scale, scale * -128

    return _grouped(weight, 8, fit, group=weight.shape[1])


def quantize_fp8(weight: Tensor) -> GroupedMatrix:
    """Quantize to f8e4m3 with one scale per row, whose largest magnitude becomes 448."""
    every = torch.arange(256, dtype=torch.uint8, device=weight.device)
    levels = every.view(torch.float8_e4m3fn).float().nan_to_num(0.0)  # two codes are NaN, which no weight gets

    def fit(x: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = x.abs().amax(-1, keepdim=True) / F8E4M3_MAX
        ratio = (x / torch.where(scale != 0, scale, 1.0)).clamp_(-F8E4M3_MAX, F8E4M3_MAX)
        return ratio.to(torch.float8_e4m3fn).view(torch.uint8), scale, None

    return _grouped(weight, 8, fit, group=weight.shape[1], levels=levels)


def _grouped(
    weight: Tensor,
    bits: int,
    fit: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]],
    *,
    group: int = GROUP,
    levels: Tensor | None = None,
) -> GroupedMatrix:
    """Quantize a matrix some rows at a time.

    :param fit: returns codes, scales and minima of groups: ``[..., group]`` -> ``[..., group]``, ``[..., 1]``,
        ``[..., 1]``
    """
    rows, cols = weight.shape
    codes = weight.new_empty(rows, cols, dtype=torch.uint8)
    scales = weight.new_empty(rows, -(-cols // group), dtype=torch.float32)
    minima = None
    for part, values in float_parts(weight, weights_at_once(weight.device, on_cpu=_WEIGHTS_AT_ONCE)):
        for columns, groups in _runs(cols, group):
            x = values[:, columns].reshape(len(values), groups.stop - groups.start, -1)
            own_codes, own_scales, own_minima = fit(x)
            codes[part, columns] = own_codes.to(torch.uint8).flatten(1)
            scales[part, groups] = own_scales.squeeze(-1)
            if own_minima is not None:
                minima = torch.empty_like(scales) if minima is None else minima
                minima[part, groups] = own_minima.squeeze(-1)
    return GroupedMatrix(codes=codes, scales=scales, minima=minima, group_size=group, levels=levels, bits=bits)


def _runs(cols: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of columns with the range of their groups: full groups, then the last group if it is shorter."""
    whole = cols // group
    if whole:
        yield slice(0, whole * group), slice(0, whole)
    if cols % group:
        yield slice(whole * group, cols), slice(whole, whole + 1)


def _codes(x: Tensor, scale: Tensor, minimum: Tensor, levels: float) -> Tensor:
    return ((x - minimum) / torch.where(scale != 0, scale, 1.0)).round_().clamp_(0, levels)


def _error(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return (codes * scale + minimum - x).square().sum(-1, keepdim=True)


def _half(values: Tensor) -> Tensor:
    return values.half().float()
