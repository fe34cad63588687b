"""KV elements in FP8 (f8e4m3) with one float32 scale per token and KV head.

The scale is computed from the vector itself, ``amax / 448``, so it depends neither on how a prompt was cut into chunks
nor on calibration, and no value overflows. f8e4m3 is the finite format of Micikevicius et al., "FP8 Formats for Deep
Learning" (2022): 4 bits of exponent with bias 7, 3 of mantissa, largest value 448.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["F8E4M3_MAX", "dequantise_f8e4m3", "quantise_f8e4m3"]

F8E4M3_MAX: Final = 448.0


def quantise_f8e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension.

    :param x: ``[..., head_size]``, any floating dtype
    :returns: codes ``[..., head_size]`` float8_e4m3fn and scales ``[...]`` float32, with ``x = codes * scale``.
        A vector that holds NaN or Inf has a scale of NaN or Inf: it stays visible, and stays in its own vector.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / F8E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    # The cast has no saturation: rounding that carries past 448 would give NaN.
    codes = (x / scale.unsqueeze(-1)).clamp(-F8E4M3_MAX, F8E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def dequantise_f8e4m3(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`quantise_f8e4m3`.

    :param codes: ``[..., head_size]`` float8_e4m3fn, none of them NaN
    :param scale: ``[...]`` float32
    :returns: ``[..., head_size]`` of ``dtype``
    """
    # An f8e4m3 value, subnormals included, is 256 times the float16 with its sign, exponent and mantissa bits in the
    # same places: one sign-extending shift, less the bit that the extension put on the exponent. On a CPU this takes a
    # tenth of the time of ``codes.float()``.
    bits = codes.view(torch.int8).to(torch.int16) << 7
    halves = (bits & ~0x4000).view(torch.float16)
    return (halves * (scale * 256).unsqueeze(-1)).to(dtype)
