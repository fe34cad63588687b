"""Compute the slopes of ALiBi (Press et al., 2021, arXiv 2108.12409)."""

from __future__ import annotations

__all__ = ["alibi_slopes"]


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return what each head's scores lose per token of distance.

    A power of two of heads have the powers of one number. Heads beyond that take every other one of the powers that
    twice as many heads would have.

    :param largest: the last of a power of two of heads loses ``2**-largest``
    """
    whole: int = 1 << (num_heads.bit_length() - 1)
    exponents = [largest * i / whole for i in range(1, whole + 1)]
    exponents += [largest * (2 * i + 1) / (2 * whole) for i in range(num_heads - whole)]
    return tuple(2.0**-exponent for exponent in exponents)
