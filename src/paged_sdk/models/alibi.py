"""Compute the slopes of ALiBi (Press et al., 2021, arXiv 2108.12409)."""

from __future__ import annotations

__all__ = ["alibi_slopes"]


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return each head's slope: how much its scores decrease per token of distance.

    For n heads, n a power of two, head i has the slope ``2 ** (-largest * i / n)``, i from 1. Heads beyond the largest
    power of two take every other slope of twice that many heads, from the first.

    :param largest: negative binary logarithm of the smallest slope
    """
    whole: int = 1 << (num_heads.bit_length() - 1)
    exponents = [largest * i / whole for i in range(1, whole + 1)]
    exponents += [largest * (2 * i + 1) / (2 * whole) for i in range(num_heads - whole)]
    return tuple(2.0**-exponent for exponent in exponents)
