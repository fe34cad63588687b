"""Fits scales and minima to groups of weights by least squares, for :mod:`paged_sdk.kernels.quantized.quantize`.

Groups are the columns of ``x``, float32 ``[weights of a group, groups]``. ``w`` has the weights of squared errors in
the same shape; None: equal weights.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Fit", "SmallScales", "encode", "fit_affine", "fit_blocks", "fit_signed", "fit_symmetric", "rounded"]

_TINY: Final = 1e-30  # smaller ranges are treated as zero: their inverse would overflow
_NOISE: Final = 1e-5  # relative to sums of 32 products: some five times their rounding error
_STEPS: Final = 10  # roundings tried on either side of the one that fits a group's range, a tenth of a code apart


@frozen(eq=False)
class Fit:
    """Holds each group's fit: weights are approximated by ``scale * code + minimum``, both float32 ``[groups]``."""

    scale: Tensor
    minimum: Tensor


@frozen(eq=False)
class _CodeSums:
    """Holds the sums over each group that a least-squares fit of ``x`` by its codes ``q`` needs, weighted by ``w``."""

    q: Tensor
    qq: Tensor
    xq: Tensor


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, or 0 where b is not positive."""
    return torch.where(b > 0, a / b.clamp_min(_TINY), 0.0)


def _inverse(a: Tensor) -> Tensor:
    """Return ``1 / a``, or 0 where a is 0."""
    one = torch.ones_like(a)
    return _ratio(one, a) - _ratio(one, 0 - a)


def _in_order(values: Tensor) -> Tensor:
    """Sum the rows one by one, so that every device rounds alike."""
    total = torch.zeros_like(values[0])
    for row in values:
        total += row
    return total


def _codes(x: Tensor, offset: Tensor, inverse: Tensor, lowest: float, highest: float) -> Tensor:
    return (x - offset).mul_(inverse).round_().clamp_(lowest, highest)


def _code_sums(
    x: Tensor, w: Tensor | None, offset: Tensor, inverse: Tensor, lowest: float, highest: float
) -> _CodeSums:
    q = _codes(x, offset, inverse, lowest, highest)
    if w is None:
        return _CodeSums(q.sum(0), (q * q).sum(0), _in_order(x * q))  # sums of integers are exact in any order
    wq = w * q
    return _CodeSums(_in_order(wq), _in_order(wq * q), _in_order(x * wq))


@frozen(eq=False)
class _Totals:
    """Holds the sums over each group of ``w`` and of ``w * x``.

    :ivar count: the number of weights of a group if all have equal weights, else None
    """

    w: Tensor
    x: Tensor
    count: int | None

    @classmethod
    def of(cls, x: Tensor, w: Tensor | None) -> _Totals:
        if w is None:
            return cls(torch.full_like(x[0], len(x)), _in_order(x), len(x))
        return cls(_in_order(w), _in_order(w * x), None)

    def shared(self, total: Tensor) -> Tensor:
        """Divide a sum over each group by the sum of ``w``."""
        return _ratio(total, self.w) if self.count is None else total * (1 / self.count)  # a power of two


def _ranges(levels: float) -> list[float]:
    """Return the numbers of codes, in float32, that a group's range is mapped to in the roundings that are tried."""
    middle, tenth = torch.tensor([levels, 0.1], dtype=torch.float32)
    return [float(middle + tenth * step) for step in range(-_STEPS, _STEPS + 1)]


def fit_affine(x: Tensor, w: Tensor | None, levels: float, *, is_k: bool) -> Fit:
    """Fit a scale and a minimum for the codes 0 ... levels; a K format's minimum is never above zero."""
    lowest, total = x.amin(0), _Totals.of(x, w)
    if is_k:
        lowest = lowest.clamp_max(0)
    spread = (x.amax(0) - lowest).clamp_min(_TINY)
    mean = total.shared(total.x)
    best = Fit(torch.zeros_like(mean), mean.clamp_max(0) if is_k else mean)
    most = torch.full_like(mean, -1.0)  # the largest reduction of the sum of squares so far

    def attempt(offset: Tensor, inverse: Tensor) -> None:
        nonlocal best, most
        sums = _code_sums(x, w, offset, inverse, 0, levels)
        squares = total.w * sums.qq
        determinant = squares - sums.q * sums.q
        if w is not None:  # ignore rounding noise if all codes are the same; without ``w``, these sums are exact
            noise = torch.full_like(squares, _NOISE) * squares
            determinant = torch.where(determinant > noise, determinant, 0.0)
        scale = _ratio(total.w * sums.xq - total.x * sums.q, determinant)
        minimum = total.shared(total.x - scale * sums.q)
        if is_k:  # if the fitted minimum is above zero, which is not allowed, fit the scale alone
            scale = torch.where(minimum > 0, _ratio(sums.xq, sums.qq), scale)
            minimum = torch.where(minimum > 0, 0.0, minimum)
        gain = scale * sums.xq + minimum * total.x
        is_better = gain > most
        best = Fit(torch.where(is_better, scale, best.scale), torch.where(is_better, minimum, best.minimum))
        most = torch.where(is_better, gain, most)

    for codes in _ranges(levels):
        attempt(lowest, torch.full_like(spread, codes) / spread)
    for _ in range(3):  # refit to the codes nearest to the best fit
        attempt(best.minimum, _inverse(best.scale))
    return best


def fit_symmetric(x: Tensor, w: Tensor | None, half: float) -> Fit:
    """Fit a scale for the codes -half ... half - 1. The weight with the largest magnitude is mapped close to -half."""
    lowest, highest = x.amin(0), x.amax(0)
    magnitude = torch.maximum(highest, 0 - lowest).clamp_min(_TINY)
    sign = torch.where(lowest + highest > 0, -1.0, 1.0)
    none = torch.zeros_like(magnitude)
    best, most = none, none
    for codes in _ranges(half):
        sums = _code_sums(x, w, none, sign * (torch.full_like(magnitude, codes) / magnitude), -half, half - 1)
        scale = _ratio(sums.xq, sums.qq)
        gain = scale * sums.xq
        best, most = torch.where(gain > most, scale, best), torch.where(gain > most, gain, most)
    return Fit(best, none)


def encode(x: Tensor, fit: Fit, lowest: float, highest: float) -> Tensor:
    """Return the nearest codes minus ``lowest``, uint8 ``[groups, weights of a group]``."""
    codes = _codes(x, fit.minimum, _inverse(fit.scale), lowest, highest)
    return (codes - lowest).to(torch.uint8).t().contiguous()


def rounded(values: Tensor) -> Tensor:
    """Round each value to float16, and return it as float32."""
    return values.half().float()


@frozen(eq=False)
class SmallScales:
    """Holds scales and minima of blocks of eight or sixteen groups, as small integers times a float16.

    :ivar unit: ``[blocks]``, the float16 unit of scales
    :ivar least: ``[blocks]``, the float16 unit of negated minima (minima are never above zero)
    :ivar scales: ``[blocks, groups]``, small integers; ``minima`` likewise
    """

    unit: Tensor
    least: Tensor
    scales: Tensor
    minima: Tensor

    def fit(self) -> Fit:
        """Return the scale and minimum of each group."""
        scale, minimum = self.unit[:, None] * self.scales, -self.least[:, None] * self.minima
        return Fit(scale.flatten(), minimum.flatten())


def _small(values: Tensor, unit: Tensor, most: float) -> Tensor:
    wide = unit[:, None].expand_as(values)
    return torch.where(wide > 0, (values / wide + 0.5).floor().clamp_max(most), 0.0)


def _refitted(x: Tensor, w: Tensor | None, levels: int, stored: SmallScales) -> SmallScales:
    """Refit the float16 units by least squares, given the small integers and the weights' codes."""
    fit = stored.fit()
    sums, total = _code_sums(x, w, fit.minimum, _inverse(fit.scale), 0, levels), _Totals.of(x, w)
    scales, minima = stored.scales.double(), stored.minima.double()
    parts = (sums.q, sums.qq, sums.xq, total.x, total.w)
    q, qq, xq, sum_x, sum_w = (each.view(scales.shape).double() for each in parts)
    # A weight is about unit * a - least * b.
    aa, ab = _in_order((scales * scales * qq).t()), _in_order((scales * minima * q).t())
    bb = _in_order((minima * minima * sum_w).t())
    ax, bx = _in_order((scales * xq).t()), _in_order((minima * sum_x).t())
    determinant = aa * bb - ab * ab
    is_regular = determinant > 0
    divisor = torch.where(is_regular, determinant, 1.0)
    alone = torch.where(aa > 0, ax / torch.where(aa > 0, aa, 1.0), 0.0)
    unit = torch.where(is_regular, (ax * bb - ab * bx) / divisor, alone)
    least = torch.where(is_regular, (ab * ax - aa * bx) / divisor, 0.0)
    keep = (unit < 0) | (least < 0) | (~is_regular & (bb > 0))
    return SmallScales(
        torch.where(keep, stored.unit, rounded(unit.float())),
        torch.where(keep, stored.least, rounded(least.float())),
        stored.scales,
        stored.minima,
    )


def fit_blocks(x: Tensor, w: Tensor | None, levels: int, most: int) -> SmallScales:
    """Fit blocks of 256 weights, whose groups have integer scales and minima of 0 ... most."""
    fit, groups = fit_affine(x, w, levels, is_k=True), 256 // len(x)
    scale, below = fit.scale.view(-1, groups), -fit.minimum.view(-1, groups)
    largest = torch.full_like(scale[:, 0], most)
    unit, least = rounded(scale.amax(1) / largest), rounded(below.amax(1) / largest)
    return _refitted(x, w, levels, SmallScales(unit, least, _small(scale, unit, most), _small(below, least, most)))


def fit_signed(x: Tensor, w: Tensor | None, half: float, lowest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit blocks of sixteen groups with signed integer scales of ``lowest ... -lowest - 1``; the scale with the largest
    magnitude becomes ``lowest``.

    :returns: the units, ``[blocks]``; the integer scales, ``[blocks, 16]``; the codes plus ``half``, uint8
        ``[blocks, 256]``
    """
    scale = fit_symmetric(x, w, half).scale.view(-1, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))[:, 0]
    unit = rounded(largest / torch.full_like(largest, lowest))
    wide = unit[:, None].expand_as(scale)
    numbers = (scale / torch.where(wide != 0, wide, 1.0) + 0.5).floor().clamp(lowest, -lowest - 1)
    numbers = torch.where(wide != 0, numbers, 0.0)
    stored = (wide * numbers).flatten()
    return unit, numbers, encode(x, Fit(stored, torch.zeros_like(stored)), -half, half - 1).view(-1, 256)
