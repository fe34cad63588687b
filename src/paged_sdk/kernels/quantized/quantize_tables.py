"""Quantizes dense weights to GGUF blocks whose codes index a table: IQ4_NL, IQ4_XS, MXFP4, TQ1_0 and TQ2_0.

For each group of weights several roundings are tried, most of them with a least-squares fit of the scale, and the scale
with the smallest squared error is stored. Every weight then gets the nearest entry given the stored scale. The layouts
are those that :mod:`paged_sdk.kernels.quantized.codebook_blocks` decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from paged_sdk.errors import UnsupportedQuantizationError
from paged_sdk.kernels.quantized.codebook_blocks import E2M1_VALUES, IQ4_VALUES
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, tensor_type_of
from paged_sdk.kernels.quantized.quantize import float_parts

__all__ = ["TABLE_TYPES", "quantize_table_blocks"]

_TINY: Final = 1e-30
_WEIGHTS_AT_ONCE: Final = 1 << 17
_THRESHOLDS: Final = 20  # tried for a ternary block, evenly spaced over its range
_SCALES: Final = tuple(0.05 * step for step in range(-5, 6))  # relative deviations from the scale that fits the range


def quantize_table_blocks(weight: Tensor, tensor_type: int, importance: Tensor | None = None) -> Tensor:
    """Quantize a matrix to GGUF blocks.

    :param weight: ``[rows, columns]`` of a floating point dtype
    :param tensor_type: ggml's number of the type, one of :data:`TABLE_TYPES`
    :param importance: float32 ``[columns]``: weights of the columns' squared errors, positive and about 1 on average;
        None: equal weights
    :returns: uint8 ``[rows, bytes of a row]`` on the weight's device
    :raises UnsupportedQuantizationError: the type is another, or the columns are no multiple of its block
    :raises CheckpointError: ``weight`` has NaN, Inf or magnitudes above 32,768
    """
    rows, cols = weight.shape
    write, form = _WRITERS.get(tensor_type), BLOCK_FORMATS.get(tensor_type)
    if write is None or form is None or cols % form.elements:
        name = str(tensor_type) if form is None else form.name
        raise UnsupportedQuantizationError(
            f"a weight of {cols} columns cannot be quantized to {name} by a table", quantization=name
        )
    out = weight.new_empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    for part, values in float_parts(weight, _WEIGHTS_AT_ONCE):
        weights = None if importance is None else importance.expand_as(values).reshape(-1, form.elements)
        out[part] = write(values.reshape(-1, form.elements), weights).view(len(values), -1)
    return out


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, or 0 where b is nearly 0."""
    return torch.where(b.abs() > _TINY, a / torch.where(b.abs() > _TINY, b, 1.0), 0.0)


def _nearest(x: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """Return for each element of ``x`` the index of the nearest entry of an ascending table times its group's scale."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(_quotient(x, scale.unsqueeze(1).expand_as(x)), middles)


def _times(values: Tensor, w: Tensor | None) -> Tensor:
    return values if w is None else values * w


def _fitted(x: Tensor, w: Tensor | None) -> Tensor:
    """Return each group's best scale for IQ4's table, ``[groups]``. Both signs are tried, since the table is not
    symmetric.

    :param w: weights of squared errors, in the shape of ``x``; None: equal weights; in the other functions likewise
    """
    entries = x.new_tensor(IQ4_VALUES)
    # The midpoints of entries are integers or half-integers, so a lookup table with steps of 1/2 gives the nearest
    # entry: 0.6 ns per weight, where a search among the midpoints takes 20.
    halves = torch.arange(2 * IQ4_VALUES[0], 2 * IQ4_VALUES[-1] + 1, dtype=torch.float32, device=x.device) / 2 + 0.25
    nearest = entries[(halves[:, None] - entries).abs().argmin(1)]
    furthest = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    best, most = torch.zeros_like(furthest), torch.zeros_like(furthest)
    for end in (IQ4_VALUES[0], IQ4_VALUES[-1]):
        for extra in _SCALES:
            inverse = _quotient(torch.full_like(furthest, 2 * end * (1 + extra)), furthest)
            places = (x * inverse[:, None]).sub_(2 * IQ4_VALUES[0]).floor_().clamp_(0, len(nearest) - 1)
            q = torch.index_select(nearest, 0, places.int().flatten()).view_as(x)
            wq = _times(q, w)
            xq, qq = (x * wq).sum(1), (q * wq).sum(1)
            gain = _quotient(xq * xq, qq)
            best, most = torch.where(gain > most, _quotient(xq, qq), best), torch.where(gain > most, gain, most)
    return best


def _joined(codes: Tensor) -> Tensor:
    """Pack 32 4-bit codes, the first 16 in the low nibbles. ``[n, 32] -> [n, 16]``."""
    q = codes.to(torch.uint8)
    return q[:, :16] | q[:, 16:] << 4


def _halves(values: Tensor) -> Tensor:
    return values.half().view(torch.uint8).view(-1, 2)


def _iq4_nl(x: Tensor, w: Tensor | None) -> Tensor:
    table = x.new_tensor(IQ4_VALUES)
    scale = _fitted(x, w).half()
    return torch.cat([_halves(scale), _joined(_nearest(x, scale.float(), table))], dim=1)


def _iq4_xs(x: Tensor, w: Tensor | None) -> Tensor:
    """Write blocks of 256 weights with a scale per 32: a 6-bit number, minus 32, times a float16."""
    table = x.new_tensor(IQ4_VALUES)
    groups = x.reshape(-1, 32)
    scales = _fitted(groups, None if w is None else w.reshape(-1, 32)).view(-1, 8)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))[:, 0]
    unit = (largest / -32).half()
    numbers = _quotient(scales, unit.float()[:, None].expand_as(scales)).round().clamp(-32, 31)
    codes = _joined(_nearest(groups, (unit.float()[:, None] * numbers).flatten(), table))
    six = (numbers + 32).to(torch.uint8)
    low = six[:, 0::2] & 15 | six[:, 1::2] << 4
    pairs = (six >> 4).view(-1, 2, 4) << six.new_tensor((0, 2, 4, 6))
    return torch.cat([_halves(unit), pairs.sum(2, dtype=torch.uint8), low, codes.view(len(x), -1)], dim=1)


def _mxfp4(x: Tensor, w: Tensor | None) -> Tensor:
    """Write blocks of 32 weights whose scale is a power of two: of three near the range, that with the least error."""
    ascending, order = x.new_tensor(E2M1_VALUES).sort(stable=True)
    # The scale puts the largest weight between the two largest entries, 4 and 6, which are doubled in the table.
    power = torch.frexp(x.abs().amax(1).clamp_min(2.0**-120)).exponent - 3
    best, error, codes = power, torch.full_like(x[:, 0], torch.inf), torch.zeros_like(x, dtype=torch.int64)
    for more in (0, 1, -1):
        scale = torch.exp2((power + more).float()) / 2
        places = _nearest(x, scale, ascending)
        squares = _times((ascending[places] * scale[:, None] - x).square(), w).sum(1)
        is_better = squares < error
        best, error = torch.where(is_better, power + more, best), torch.where(is_better, squares, error)
        codes = torch.where(is_better[:, None], places, codes)
    exponent = (best + 127).to(torch.uint8)
    return torch.cat([exponent[:, None], _joined(order[codes])], dim=1)


def _ternary(x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each block's scale as float16, and codes 0, 1 and 2 for minus the scale, zero and the scale.

    The scale is the mean magnitude of the weights above a threshold; the best of several thresholds is chosen.
    """
    size = x.abs()
    largest = size.amax(1)
    best, most = torch.zeros_like(largest), torch.zeros_like(largest)
    for step in range(_THRESHOLDS):
        beyond = size > (largest * (step / _THRESHOLDS))[:, None]
        counted = _times(beyond.float(), w)
        total, count = (size * counted).sum(1), counted.sum(1)
        gain = _quotient(total * total, count)
        best, most = torch.where(gain > most, _quotient(total, count), best), torch.maximum(gain, most)
    scale = best.half()
    return scale, _nearest(x, scale.float(), x.new_tensor((-1.0, 0.0, 1.0))).to(torch.uint8)


def _tq2_0(x: Tensor, w: Tensor | None) -> Tensor:
    scale, codes = _ternary(x, w)
    shifts = codes.new_tensor((0, 2, 4, 6))[:, None]
    pairs = (codes.view(-1, 2, 4, 32) << shifts).sum(2, dtype=torch.uint8)
    return torch.cat([pairs.view(len(x), -1), _halves(scale)], dim=1)


def _tq1_0(x: Tensor, w: Tensor | None) -> Tensor:
    """Write blocks with five ternary codes per byte, as a base-3 fraction, rounded up so that it decodes exactly."""
    scale, codes = _ternary(x, w)

    def fractions(part: Tensor, count: int) -> Tensor:
        digits = part.reshape(len(x), count, -1).int()
        powers = digits.new_tensor([3 ** (4 - place) for place in range(count)])[:, None]
        number = (digits * powers).sum(1, dtype=torch.int32)
        return ((number * 256 + 242) // 243).to(torch.uint8)

    parts = fractions(codes[:, :160], 5), fractions(codes[:, 160:240], 5), fractions(codes[:, 240:], 4)
    return torch.cat([*parts, _halves(scale)], dim=1)


_WRITERS: Final[Mapping[int, Callable[[Tensor, Tensor | None], Tensor]]] = MappingProxyType(
    {
        tensor_type_of(name): write
        for name, write in {
            "IQ4_NL": _iq4_nl,
            "IQ4_XS": _iq4_xs,
            "MXFP4": _mxfp4,
            "TQ1_0": _tq1_0,
            "TQ2_0": _tq2_0,
        }.items()
    }
)

TABLE_TYPES: Final = frozenset(_WRITERS)
"""ggml's numbers of the types that :func:`quantize_table_blocks` can write."""
