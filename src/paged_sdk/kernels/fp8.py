"""Quantizes keys and values to FP8 (f8e4m3) with one float32 scale per token and KV head.

The scale is computed from the vector itself, so it depends neither on how a prompt was cut into chunks nor on
calibration, and no value overflows. f8e4m3 is the finite format of Micikevicius et al., "FP8 Formats for Deep Learning"
(2022): 4 bits of exponent with bias 7, 3 of mantissa, largest value 448.

The scale may map a vector's largest element to any code: that element is exact in any case, but the rounding errors of
the others depend on the choice. Of the seven codes in the top binade (256 to 448), the one with the least squared error
is chosen. Compared with always 448, that lowers the mean KL against unquantized keys and values by 29 % on SmolLM2-135M
over four texts of 768 tokens; choosing among four of the codes lowers it by 24 %, among four evenly spaced scales by
14 %.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["ERROR_STEPS", "F8E4M3_MAX", "PEAK_CODES", "dequantize_f8e4m3", "quantize_f8e4m3"]

F8E4M3_MAX: Final = 448.0
PEAK_CODES: Final = range(448, 255, -32)
"""Candidate codes for the largest element of a vector."""
ERROR_STEPS: Final = 128
"""Rounding errors are counted in integer units of ``scale / ERROR_STEPS``. Integer sums do not depend on the order, so
all kernels choose the same scale. An error is at most 16 scales, so 256 squared errors sum to at most 2**30."""


def quantize_f8e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize along the last dimension.

    :param x: ``[..., head_dim]``, any floating dtype
    :returns: codes ``[..., head_dim]`` float8_e4m3fn and scales ``[...]`` float32, with ``x = codes * scale``.
        A vector with NaN or Inf has a scale of NaN or Inf, so it stays detectable and affects no other vector
    """
    x = x.float()
    peak_codes = torch.arange(PEAK_CODES.start, PEAK_CODES.stop, PEAK_CODES.step, device=x.device)
    scales = (x.abs().amax(-1, keepdim=True) / peak_codes).clamp_min(torch.finfo(torch.float32).tiny)
    errors = _squared_error(x.unsqueeze(-2), scales) / peak_codes.square()
    scale = scales.gather(-1, errors.argmin(-1, keepdim=True))  # of equals, the first
    # The cast does not saturate: a value that rounds above 448 would become NaN.
    codes = (x * scale.reciprocal()).clamp(-F8E4M3_MAX, F8E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale.squeeze(-1)


def _squared_error(x: Tensor, scale: Tensor) -> Tensor:
    """Compute the squared error of rounding a vector to codes, in units of ``(scale / ERROR_STEPS) ** 2``."""
    ratio = (x * scale.reciprocal().unsqueeze(-1)).abs()
    # Round to three bits of mantissa. Subnormal codes have fewer bits, but their errors round to 0 steps.
    nearest = ((ratio.view(torch.int32) + 0x80000) & ~0xFFFFF).view(torch.float32)
    steps = ((ratio - nearest) * ERROR_STEPS).round().to(torch.int32)
    return steps.square().sum(-1).float()


def dequantize_f8e4m3(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the result of :func:`quantize_f8e4m3`.

    :param codes: ``[..., head_dim]`` float8_e4m3fn, none of them NaN
    :param scale: ``[...]`` float32
    :returns: ``[..., head_dim]`` of ``dtype``
    """
    # Shifted left by 7 bits, an f8e4m3 code's exponent and mantissa are those of a float16 with 1/256 of its value,
    # subnormals included. The sign-extending shift also sets the exponent's top bit, which is masked out. On a CPU this
    # takes a tenth of the time of ``codes.float()``.
    bits = codes.view(torch.int8).to(torch.int16) << 7
    halves = (bits & ~0x4000).view(torch.float16)
    return (halves * (scale * 256).unsqueeze(-1)).to(dtype)
