"""Quantizes keys and values to 4-bit codes with a scale and a minimum per 32 neighbouring elements: 5 bits an element.

Scales and minimums depend on the vector alone, not on how a prompt was cut into chunks. They are bfloat16: every
float32 has one nearby, and its coarser steps add less than 0.1 % to the squared error of Gaussian elements.

The range of the codes need not be the group's: cutting off a little at either end makes the steps smaller. Of nine
ranges the one with the least squared error is chosen, which lowers the error of Gaussian elements by 11 %; 16 ranges
lower it by 14 %, a cut at both ends alike by 5 %.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["CUTS", "GROUP", "MAX_CODE", "Q4_ERROR_STEPS", "dequantize_q4", "quantize_q4"]

GROUP: Final = 32
"""Elements that share a scale and a minimum."""
MAX_CODE: Final = 15
CUTS: Final = (0.0, 0.04, 0.08)
"""Candidate shares of a group's range that are cut off at its lower and at its upper end."""
Q4_ERROR_STEPS: Final = 128
"""Rounding errors are counted in integer units of ``scale / Q4_ERROR_STEPS``. Integer sums do not depend on the order,
so all kernels choose the same range."""
_MOST_STEPS: Final = 2047
"""Larger errors count as this, the largest whose square all kernels round exactly. An error is at most 2.5 scales, or
320 steps, unless a group's range is less than its minimum's last bit."""


def quantize_q4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize along the last dimension.

    :param x: ``[..., head_dim]``, any floating dtype; ``head_dim`` is a multiple of 32
    :returns: codes ``[..., head_dim // 2]`` uint8, of which byte ``i`` of a group has element ``i`` in its lower and
        element ``i + 16`` in its upper half, and ``[..., head_dim // 32, 2]`` bfloat16, a scale and a minimum per
        group: ``x = codes * scale + minimum``. A group with NaN or Inf has a scale or a minimum that is not finite, so
        it stays detectable
    """
    groups = torch.unflatten(x.float(), -1, (-1, GROUP))
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    cuts = torch.tensor(CUTS, dtype=torch.float32, device=x.device)
    below, above = cuts.repeat_interleave(len(CUTS)), cuts.repeat(len(CUTS))
    width = highest - lowest
    scales = _rounded((width * ((1 - below - above) / MAX_CODE)).clamp_min(torch.finfo(torch.float32).tiny))
    minimums = _rounded(lowest + width * below)
    ratios = (groups.unsqueeze(-2) - minimums.unsqueeze(-1)) * scales.reciprocal().unsqueeze(-1)
    codes = ratios.round().clamp(0, MAX_CODE)
    steps = ((ratios - codes) * Q4_ERROR_STEPS).clamp(-_MOST_STEPS, _MOST_STEPS).round().to(torch.int32)
    errors = steps.square().sum(-1).float() * scales.square()
    best = errors.argmin(-1, keepdim=True)  # of equals, the first
    chosen = codes.gather(-2, best.unsqueeze(-1).expand(*best.shape, GROUP)).squeeze(-2).to(torch.uint8)
    lower, upper = torch.unflatten(chosen, -1, (2, -1)).unbind(-2)
    parameters = torch.cat((scales.gather(-1, best), minimums.gather(-1, best)), -1)
    return (lower | upper << 4).flatten(-2), parameters.to(torch.bfloat16)


def dequantize_q4(codes: Tensor, parameters: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the result of :func:`quantize_q4`.

    :param codes: ``[..., head_dim // 2]`` uint8
    :param parameters: ``[..., head_dim // 32, 2]`` bfloat16
    :returns: ``[..., head_dim]`` of ``dtype``
    """
    halves = torch.unflatten(codes, -1, (-1, GROUP // 2))
    groups = torch.cat((halves & 0xF, halves >> 4), -1).float()
    scales, minimums = torch.split(parameters.float(), 1, -1)
    decoded: Tensor = groups * scales + minimums
    return decoded.flatten(-2).to(dtype)


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()
