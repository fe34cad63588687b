"""Quantizes dense weights to GGUF blocks with torch operations, on any device; this defines in-situ quantization.

For each group of 32 weights (16 in Q2_K, Q3_K and Q6_K), some twenty roundings to codes are tried, each with the
least-squares fit of its scale (and minimum, if the format has one). The fit with the smallest squared error is stored,
and every weight gets the nearest code given the stored scales. The block layouts are ggml's (``ggml-common.h``).

The native library does the same many times faster, with bit-identical results on every instruction set. Results are
also the same on every device: order-dependent sums are written out, and no tensor is divided by a Python number, which
CUDA replaces by multiplication with a rounded inverse.

If columns have an importance (the mean square of their activations), squared errors are weighted by it, so that their
sum approximates that of the outputs' errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockFormat, tensor_type_of
from paged_sdk.kernels.quantized.scale_fits import (
    Fit,
    encode,
    fit_affine,
    fit_blocks,
    fit_signed,
    fit_symmetric,
    rounded,
)

__all__ = [
    "QUANTIZED_TYPES",
    "float_parts",
    "not_finite",
    "quantize_blocks_reference",
    "weights_at_once",
    "writable_format",
]

_LARGEST: Final = 32768.0  # the scale of larger weights might overflow a float16
_WEIGHTS_AT_ONCE: Final = 1 << 17  # temporaries of 512 KiB, which stay in the cache
_LAUNCHED_AT_ONCE: Final = 1 << 24  # temporaries of 64 MiB, some eight at a time
_GROUPS_OF_16: Final = frozenset({"Q2_K", "Q3_K", "Q6_K"})  # groups of other types have 32 weights


def quantize_blocks_reference(weight: Tensor, tensor_type: int, importance: Tensor | None = None) -> Tensor:
    """Quantize a matrix to GGUF blocks.

    :param weight: ``[rows, columns]`` of a floating point dtype
    :param tensor_type: ggml's number of the type, one of :data:`QUANTIZED_TYPES`
    :param importance: float32 ``[columns]``: weights of the columns' squared errors, positive and about 1 on average;
        None: equal weights
    :returns: uint8 ``[rows, bytes of a row]`` on the weight's device
    :raises UnsupportedQuantizationError: the type cannot be written, or the columns are no multiple of its block
    :raises CheckpointError: ``weight`` has NaN, Inf or magnitudes above 32,768
    """
    rows, cols = weight.shape
    form = writable_format(tensor_type, cols)
    out = weight.new_empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    for part, values in float_parts(weight, weights_at_once(weight.device, on_cpu=_WEIGHTS_AT_ONCE)):
        # Groups are columns, so that operations over all groups access consecutive numbers.
        group = 16 if form.name in _GROUPS_OF_16 else 32
        blocks = _WRITERS[tensor_type](_in_groups(values, group), _weights(importance, values, group))
        out[part] = blocks.view(len(values), -1)
    return out


def float_parts(weight: Tensor, at_once: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows to quantize together, and their weights in float32.

    :param at_once: approximate number of weights in a range
    :raises CheckpointError: a weight is NaN, Inf or of a magnitude above 32,768
    """
    step = max(1, at_once // weight.shape[1])
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        values = weight[part].float()
        if not bool((values.abs() <= _LARGEST).all()):
            raise not_finite()
        yield part, values


def weights_at_once(device: torch.device, *, on_cpu: int) -> int:
    """Return the number of weights to quantize at once on a device. Results do not depend on it.

    On the CPU, small parts keep temporaries in the cache. On other devices each part costs a synchronization and many
    launches (Q4_K 2,200, Q6_K 970, HQQ 300), during which 131,072 weights would not keep the device busy.

    :param on_cpu: the number for the CPU
    """
    return on_cpu if device.type == "cpu" else max(on_cpu, _LAUNCHED_AT_ONCE)


def _in_groups(values: Tensor, group: int) -> Tensor:
    return values.reshape(-1, group).t().contiguous()


def _weights(importance: Tensor | None, values: Tensor, group: int) -> Tensor | None:
    """Return the weights of squared errors in the layout of the groups, or None without importance."""
    return None if importance is None else _in_groups(importance.to(values).expand_as(values), group)


def writable_format(tensor_type: int, cols: int) -> BlockFormat:
    """Return a type's format if rows of ``cols`` columns can be quantized to it.

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
    """Return the error of a weight that cannot be quantized."""
    return CheckpointError("a weight cannot be quantized: it holds NaN, Inf or numbers above 32,768")


def _halves(values: Tensor) -> Tensor:
    """Return float32 ``[blocks]`` as the bytes of float16, ``[blocks, 2]``."""
    return values.half().view(torch.uint8).view(-1, 2)


def _join_nibbles(q: Tensor, group: int) -> Tensor:
    """Pack the low 4 bits of two codes per byte; of ``2 * group`` codes, the first are low nibbles. Inverse of
    :func:`~paged_sdk.kernels.quantized.block_bits.nibbles`. [n, b] -> [n, b / 2].
    """
    parts = q.reshape(len(q), -1, 2, group) & 15
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(q), -1)


def _join_fifth_bits(q: Tensor) -> Tensor:
    """Pack the fifth bits of 32 codes, in order. ``[n, 32] -> [n, 4]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=q.device)
    return ((q >> 4 & 1).view(len(q), 4, 8) << shifts).sum(2, dtype=torch.uint8)


_Writer: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]


def _legacy(levels: int, *, affine: bool) -> _Writer:
    """Return the writer of a format with a float16 scale, and a minimum if affine, per group of 32."""
    half = (levels + 1) / 2

    def write(x: Tensor, w: Tensor | None) -> Tensor:
        fit = fit_affine(x, w, levels, is_k=False) if affine else fit_symmetric(x, w, half)
        stored = Fit(rounded(fit.scale), rounded(fit.minimum))
        q = encode(x, stored, 0 if affine else -half, levels if affine else half - 1)
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
    """Pack the low 2 bits of four codes per byte; of ``4 * group`` codes, the first are in the lowest bits. Inverse of
    :func:`~paged_sdk.kernels.quantized.block_bits.bit_pairs`. [n, b] -> [n, b / 4].
    """
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=q.device)[:, None]
    return ((q & 3).view(len(q), -1, 4, group) << shifts).sum(2, dtype=torch.uint8).view(len(q), -1)


def _join_planes(bits: Tensor) -> Tensor:
    """Pack single bits: the 32 bits of group i of a block become bit i of 32 bytes. ``[n, 256] -> [n, 32]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]
    return (bits.view(-1, 8, 32) << shifts).sum(1, dtype=torch.uint8)


def _k(levels: int) -> _Writer:
    """Return the writer of a K format with eight groups of 32 per block, and 6-bit scales and minima."""

    def write(x: Tensor, w: Tensor | None) -> Tensor:
        stored = fit_blocks(x, w, levels, 63)
        q = encode(x, stored.fit(), 0, levels).view(-1, 256)
        s, m = stored.scales.to(torch.uint8), stored.minima.to(torch.uint8)
        numbers = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
        parts = [_halves(stored.unit), _halves(stored.least), *numbers]
        if levels == 31:
            parts.append(_join_planes(q >> 4 & 1))
        return torch.cat([*parts, _join_nibbles(q, 32)], dim=1)

    return write


def _q2_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q2_K: sixteen groups of 16 per block, with 4-bit scales and minima."""
    stored = fit_blocks(x, w, 3, 15)
    q = encode(x, stored.fit(), 0, 3).view(-1, 256)
    numbers = stored.scales.to(torch.uint8) | stored.minima.to(torch.uint8) << 4
    return torch.cat([numbers, _join_pairs(q, 32), _halves(stored.unit), _halves(stored.least)], dim=1)


def _q3_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q3_K: 6-bit signed scales, whose low 4 bits are the low (0-7) and high (8-15) nibbles of eight bytes."""
    unit, numbers, q = fit_signed(x, w, 4, -32)
    s = (numbers + 32).to(torch.uint8)
    scales = [_join_nibbles(s, 8), _join_pairs(s >> 4, 4)]
    return torch.cat([_join_planes(q >> 2), _join_pairs(q, 32), *scales, _halves(unit)], dim=1)


def _q6_k(x: Tensor, w: Tensor | None) -> Tensor:
    """Write Q6_K: int8 scales."""
    unit, numbers, q = fit_signed(x, w, 32, -128)
    scales = numbers.to(torch.int8).view(torch.uint8)
    return torch.cat([_join_nibbles(q, 64), _join_pairs(q >> 4, 32), scales, _halves(unit)], dim=1)


#: Maps ggml's number of a type to the function that writes its blocks (uint8) from weights and the weights of their
#: squared errors, float32 [weights of a group, groups] each.
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
"""ggml's numbers of the types that weights can be quantized to."""
