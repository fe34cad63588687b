"""Quantizes dense weights to GGUF blocks by torch's operations, on any device; it defines in-situ quantization.

A group of 32 weights (16 in Q2_K, Q3_K and Q6_K) takes the scale, and minimum where the format has one, of the smallest
squared error among some twenty roundings, each with its least-squares fit; every weight then takes the code that is
nearest with the scales as they are stored. The block layouts are ggml's (``ggml-common.h``).

The native library does the same many times faster, and gives the same bits on every instruction set. Sums that depend
on their order are written out, and no tensor is divided by a Python number, for which CUDA multiplies by a rounded
inverse: so every device gives these bits.

Where columns have an importance (the mean square of what they are multiplied by), squared errors are weighted by it:
their sum is then near that of the outputs' errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS, BlockFormat, tensor_type_of

__all__ = [
    "QUANTIZED_TYPES",
    "float_parts",
    "not_finite",
    "quantize_blocks_reference",
    "weights_at_once",
    "writable_format",
]

_TINY: Final = 1e-30  # ranges below it are zero: their inverse would overflow
_NOISE: Final = 1e-5  # of the sums of 32 products, some five times what rounding may leave
_LARGEST: Final = 32768.0  # the scale of larger weights might overflow a float16
_STEPS: Final = 10  # roundings that are tried on either side of a group's range, a tenth of a code apart
_WEIGHTS_AT_ONCE: Final = 1 << 17  # temporaries of 512 KiB, which stay in the cache
_LAUNCHED_AT_ONCE: Final = 1 << 24  # temporaries of 64 MiB, some eight at a time
_GROUPS_OF_16: Final = frozenset({"Q2_K", "Q3_K", "Q6_K"})  # elsewhere 32 weights are fitted together


def quantize_blocks_reference(weight: Tensor, tensor_type: int, importance: Tensor | None = None) -> Tensor:
    """Quantize a matrix to the blocks that a GGUF file would hold.

    :param weight: ``[rows, columns]`` of a floating point dtype
    :param tensor_type: ggml's number of the type, one of :data:`QUANTIZED_TYPES`
    :param importance: float32 ``[columns]``, how much an error in each column counts: positive, about 1 on average;
        None: all count alike
    :returns: uint8 ``[rows, bytes of a row]`` on the weight's device
    :raises UnsupportedQuantizationError: the type cannot be written, or the columns are no multiple of its block
    :raises CheckpointError: ``weight`` holds NaN, Inf or numbers above 32,768
    """
    rows, cols = weight.shape
    form = writable_format(tensor_type, cols)
    out = weight.new_empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    for part, values in float_parts(weight, weights_at_once(weight.device, on_cpu=_WEIGHTS_AT_ONCE)):
        # Groups lie in columns, so that an operation on all groups at once takes consecutive numbers.
        group = 16 if form.name in _GROUPS_OF_16 else 32
        blocks = _WRITERS[tensor_type](_in_groups(values, group), _weights(importance, values, group))
        out[part] = blocks.view(len(values), -1)
    return out


def float_parts(weight: Tensor, at_once: int) -> Iterator[tuple[slice, Tensor]]:
    """Return which rows of a matrix are quantized together, and their weights in float32.

    :param at_once: about how many weights
    :raises CheckpointError: there are NaN, Inf or numbers above 32,768
    """
    step = max(1, at_once // weight.shape[1])
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        values = weight[part].float()
        if not bool((values.abs() <= _LARGEST).all()):
            raise not_finite()
        yield part, values


def weights_at_once(device: torch.device, *, on_cpu: int) -> int:
    """Return how many weights are to be quantized at once on a device; what comes of them does not depend on it.

    On the CPU temporaries stay in the cache if they are few. Elsewhere each piece is a wait and so many launches (Q4_K
    2,200, Q6_K 970, HQQ 300) that 131,072 weights would not keep a device busy while the host makes them.

    :param on_cpu: so many on the CPU
    """
    return on_cpu if device.type == "cpu" else max(on_cpu, _LAUNCHED_AT_ONCE)


def _in_groups(values: Tensor, group: int) -> Tensor:
    return values.reshape(-1, group).t().contiguous()


def _weights(importance: Tensor | None, values: Tensor, group: int) -> Tensor | None:
    """Return the weights of the squares of a matrix's errors, laid out as its groups are."""
    return None if importance is None else _in_groups(importance.to(values).expand_as(values), group)


def writable_format(tensor_type: int, cols: int) -> BlockFormat:
    """Return the format that rows of so many columns are quantized to.

    :raises UnsupportedQuantizationError: the type cannot be written, or the columns are no multiple of its block
    """
    fitting = {number: BLOCK_FORMATS[number] for number in sorted(QUANTIZED_TYPES)}
    fitting = {number: form for number, form in fitting.items() if cols % form.elements == 0}
    if tensor_type in fitting:
        return fitting[tensor_type]
    supported = tuple(form.name for form in fitting.values())
    known = BLOCK_FORMATS.get(tensor_type)
    name = f"GGUF tensor type {tensor_type}" if known is None else known.name
    raise UnsupportedQuantizationError(
        f"a weight of {cols} columns cannot be quantized to {name}: possible are {', '.join(supported) or 'none'}",
        quantization=name,
        supported=supported,
    )


def not_finite() -> CheckpointError:
    """Return the error of a weight that no scale fits."""
    return CheckpointError("a weight cannot be quantized: it holds NaN, Inf or numbers above 32,768")


@frozen(eq=False)
class _Fit:
    """Holds the fit of each group: weights are about ``scale * code + minimum``, both float32 ``[groups]``."""

    scale: Tensor
    minimum: Tensor


@frozen(eq=False)
class _CodeSums:
    """Holds the sums over each group that least squares need, of the codes ``q`` of weights ``x``, each times the
    weight of its square.
    """

    q: Tensor
    qq: Tensor
    xq: Tensor


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and 0 where b is not positive."""
    return torch.where(b > 0, a / b.clamp_min(_TINY), 0.0)


def _inverse(a: Tensor) -> Tensor:
    """Return ``1 / a``, and 0 where a is 0."""
    one = torch.ones_like(a)
    return _ratio(one, a) - _ratio(one, 0 - a)


def _in_order(values: Tensor) -> Tensor:
    """Sum each column from the first row to the last, so that every device rounds alike."""
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
    """Holds the sums over each group of the weights of squares, and of these times x."""

    w: Tensor
    x: Tensor
    count: int | None

    @classmethod
    def of(cls, x: Tensor, w: Tensor | None) -> _Totals:
        if w is None:
            return cls(torch.full_like(x[0], len(x)), _in_order(x), len(x))
        return cls(_in_order(w), _in_order(w * x), None)

    def shared(self, total: Tensor) -> Tensor:
        """Return a sum divided by that of the weights."""
        return _ratio(total, self.w) if self.count is None else total * (1 / self.count)  # a power of two


def _ranges(levels: float) -> list[float]:
    """Return the numbers of codes over which a group's range is spread in turn, in float32."""
    tenth = torch.tensor(0.1)
    return [float(torch.tensor(levels) + tenth * step) for step in range(-_STEPS, _STEPS + 1)]


def _fit_affine(x: Tensor, w: Tensor | None, levels: float, *, is_k: bool) -> _Fit:
    """Fit a scale and a minimum for the codes 0 ... levels; a K format's minimum is never above zero."""
    lowest, total = x.amin(0), _Totals.of(x, w)
    if is_k:
        lowest = lowest.clamp_max(0)
    spread = (x.amax(0) - lowest).clamp_min(_TINY)
    mean = total.shared(total.x)
    best = _Fit(torch.zeros_like(mean), mean.clamp_max(0) if is_k else mean)
    most = torch.full_like(mean, -1.0)  # the most that a fit has taken off the sum of squares

    def attempt(offset: Tensor, inverse: Tensor) -> None:
        nonlocal best, most
        sums = _code_sums(x, w, offset, inverse, 0, levels)
        squares = total.w * sums.qq
        determinant = squares - sums.q * sums.q
        if w is not None:  # what rounding leaves where all codes are the same; without weights, sums are exact
            noise = torch.full_like(squares, _NOISE) * squares
            determinant = torch.where(determinant > noise, determinant, 0.0)
        scale = _ratio(total.w * sums.xq - total.x * sums.q, determinant)
        minimum = total.shared(total.x - scale * sums.q)
        if is_k:  # where a minimum above zero is not allowed, the scale is fitted alone
            scale = torch.where(minimum > 0, _ratio(sums.xq, sums.qq), scale)
            minimum = torch.where(minimum > 0, 0.0, minimum)
        gain = scale * sums.xq + minimum * total.x
        is_better = gain > most
        best = _Fit(torch.where(is_better, scale, best.scale), torch.where(is_better, minimum, best.minimum))
        most = torch.where(is_better, gain, most)

    for codes in _ranges(levels):
        attempt(lowest, torch.full_like(spread, codes) / spread)
    for _ in range(3):  # the best fit's own nearest codes may have a better one
        attempt(best.minimum, _inverse(best.scale))
    return best


def _fit_symmetric(x: Tensor, w: Tensor | None, half: float) -> _Fit:
    """Fit a scale for the codes -half ... half - 1, which puts the weight that is furthest from zero near -half."""
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
    return _Fit(best, none)


def _encode(x: Tensor, fit: _Fit, lowest: float, highest: float) -> Tensor:
    """Return the nearest codes less ``lowest``, uint8 ``[groups, weights of a group]``."""
    codes = _codes(x, fit.minimum, _inverse(fit.scale), lowest, highest)
    return (codes - lowest).to(torch.uint8).t().contiguous()


def _halves(values: Tensor) -> Tensor:
    """Return float32 ``[blocks]`` as the bytes of float16, ``[blocks, 2]``."""
    return values.half().view(torch.uint8).view(-1, 2)


def _rounded(values: Tensor) -> Tensor:
    return values.half().float()


def _join_nibbles(q: Tensor, group: int) -> Tensor:
    """Pack the low 4 bits of two codes into a byte: each ``2 * group`` begin with the low. [n, b] -> [n, b / 2]."""
    parts = q.reshape(len(q), -1, 2, group) & 15
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(q), -1)


def _join_fifth_bits(q: Tensor) -> Tensor:
    """Pack the fifth bit of 32 codes, in their order. ``[n, 32] -> [n, 4]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=q.device)
    return ((q >> 4 & 1).view(len(q), 4, 8) << shifts).sum(2, dtype=torch.uint8)


_Writer: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]


def _legacy(levels: int, *, affine: bool) -> _Writer:
    """Return what writes a format with a float16 scale, and if affine a minimum, for each group of 32."""
    half = (levels + 1) / 2

    def write(x: Tensor, w: Tensor | None) -> Tensor:
        fit = _fit_affine(x, w, levels, is_k=False) if affine else _fit_symmetric(x, w, half)
        stored = _Fit(_rounded(fit.scale), _rounded(fit.minimum))
        q = _encode(x, stored, 0 if affine else -half, levels if affine else half - 1)
        scales = [_halves(stored.scale), _halves(stored.minimum)] if affine else [_halves(stored.scale)]
        match levels:
            case 15:
                return torch.cat([*scales, _join_nibbles(q, 16)], dim=1)
            case 31:
                return torch.cat([*scales, _join_fifth_bits(q), _join_nibbles(q, 16)], dim=1)
            case _:
                return torch.cat([*scales, q ^ 128], dim=1)

    return write


def _join_pairs(q: Tensor, group: int) -> Tensor:
    """Pack 2 bits of four codes into a byte: each ``4 * group`` begin with the lowest. [n, b] -> [n, b / 4]."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=q.device)[:, None]
    return ((q & 3).view(len(q), -1, 4, group) << shifts).sum(2, dtype=torch.uint8).view(len(q), -1)


def _join_planes(bits: Tensor) -> Tensor:
    """Pack single bits, 32 of each group of a block in the same bit of 32 bytes. ``[n, 256] -> [n, 32]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]
    return (bits.view(-1, 8, 32) << shifts).sum(1, dtype=torch.uint8)


@frozen(eq=False)
class _SmallScales:
    """Holds scales and minima of blocks of eight or sixteen groups, which are small integers times a float16.

    :ivar unit: ``[blocks]``, the float16 that scales are multiples of
    :ivar least: ``[blocks]``, the one that minima are multiples of, with the sign turned: minima are not above zero
    :ivar scales: ``[blocks, groups]``; ``minima`` likewise
    """

    unit: Tensor
    least: Tensor
    scales: Tensor
    minima: Tensor

    def fit(self) -> _Fit:
        scale, minimum = self.unit[:, None] * self.scales, -self.least[:, None] * self.minima
        return _Fit(scale.flatten(), minimum.flatten())


def _small(values: Tensor, unit: Tensor, most: float) -> Tensor:
    wide = unit[:, None].expand_as(values)
    return torch.where(wide > 0, (values / wide + 0.5).floor().clamp_max(most), 0.0)


def _refitted(x: Tensor, w: Tensor | None, levels: int, stored: _SmallScales) -> _SmallScales:
    """Fit the units to the small numbers, by least squares over the weights' codes."""
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
    return _SmallScales(
        torch.where(keep, stored.unit, _rounded(unit.float())),
        torch.where(keep, stored.least, _rounded(least.float())),
        stored.scales,
        stored.minima,
    )


def _fit_blocks(x: Tensor, w: Tensor | None, levels: int, most: int) -> _SmallScales:
    """Fit blocks of 256 weights, whose groups have scales and minima of 0 ... most."""
    fit, groups = _fit_affine(x, w, levels, is_k=True), 256 // len(x)
    scale, below = fit.scale.view(-1, groups), -fit.minimum.view(-1, groups)
    largest = torch.full_like(scale[:, 0], most)
    unit, least = _rounded(scale.amax(1) / largest), _rounded(below.amax(1) / largest)
    return _refitted(x, w, levels, _SmallScales(unit, least, _small(scale, unit, most), _small(below, least, most)))


def _k(levels: int) -> _Writer:
    """Return what writes a K format of eight groups of 32 in a block, with six-bit scales and minima."""

    def write(x: Tensor, w: Tensor | None) -> Tensor:
        stored = _fit_blocks(x, w, levels, 63)
        q = _encode(x, stored.fit(), 0, levels).view(-1, 256)
        s, m = stored.scales.to(torch.uint8), stored.minima.to(torch.uint8)
        numbers = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
        parts = [_halves(stored.unit), _halves(stored.least), *numbers]
        if levels == 31:
            parts.append(_join_planes(q >> 4 & 1))
        return torch.cat([*parts, _join_nibbles(q, 32)], dim=1)

    return write


def _q2_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q2_K: sixteen groups of 16 in a block, with four-bit scales and minima."""
    stored = _fit_blocks(x, w, 3, 15)
    q = _encode(x, stored.fit(), 0, 3).view(-1, 256)
    numbers = stored.scales.to(torch.uint8) | stored.minima.to(torch.uint8) << 4
    return torch.cat([numbers, _join_pairs(q, 32), _halves(stored.unit), _halves(stored.least)], dim=1)


def _fit_signed(x: Tensor, w: Tensor | None, half: float, lowest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit blocks of sixteen groups with signed scales of ``lowest ... -lowest - 1``, of which the largest is the
    lowest.

    :returns: the units, ``[blocks]``; the scales' numbers, ``[blocks, 16]``; the codes plus ``half``, uint8
        ``[blocks, 256]``
    """
    scale = _fit_symmetric(x, w, half).scale.view(-1, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))[:, 0]
    unit = _rounded(largest / torch.full_like(largest, lowest))
    wide = unit[:, None].expand_as(scale)
    numbers = (scale / torch.where(wide != 0, wide, 1.0) + 0.5).floor().clamp(lowest, -lowest - 1)
    numbers = torch.where(wide != 0, numbers, 0.0)
    stored = (wide * numbers).flatten()
    return unit, numbers, _encode(x, _Fit(stored, torch.zeros_like(stored)), -half, half - 1).view(-1, 256)


def _q3_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q3_K: six-bit signed scales, the low four bits of scales 0-7 and 8-15 in the halves of eight bytes."""
    unit, numbers, q = _fit_signed(x, w, 4, -32)
    s = (numbers + 32).to(torch.uint8)
    scales = [_join_nibbles(s, 8), _join_pairs(s >> 4, 4)]
    return torch.cat([_join_planes(q >> 2), _join_pairs(q, 32), *scales, _halves(unit)], dim=1)


def _q6_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q6_K: int8 scales."""
    unit, numbers, q = _fit_signed(x, w, 32, -128)
    scales = numbers.to(torch.int8).view(torch.uint8)
    return torch.cat([_join_nibbles(q, 64), _join_pairs(q >> 4, 32), scales, _halves(unit)], dim=1)


#: It maps ggml's number of a type to what writes its blocks, of weights and those of their squares: float32 [weights of
#: a group, groups] each -> uint8.
_WRITERS: Mapping[int, _Writer] = MappingProxyType(
    {
        tensor_type_of(name): write
        for name, write in {
            "Q4_0": _legacy(15, affine=False),
            "Q4_1": _legacy(15, affine=True),
            "Q5_0": _legacy(31, affine=False),
            "Q5_1": _legacy(31, affine=True),
            "Q8_0": _legacy(255, affine=False),
            "Q2_K": _q2_k,
            "Q3_K": _q3_k,
            "Q4_K": _k(15),
            "Q5_K": _k(31),
            "Q6_K": _q6_k,
        }.items()
    }
)

QUANTIZED_TYPES: Final = frozenset(_WRITERS)
"""Weights can be quantized to the types with these numbers of ggml's."""
