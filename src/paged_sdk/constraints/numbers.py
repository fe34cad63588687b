"""Checks and rounds the numbers of JSON schemas to what a grammar can enforce digit by digit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Final

__all__ = ["have_common_multiple", "inner_bound", "is_exact"]

_DIGITS: Final = 15
"""Significant digits that every float64 reader preserves: 0.99999999999999999 is read as 1."""
_MAX_DECIMALS: Final = 15
_CONTEXT: Final = Context(prec=400)
_MAX_EXACT_INTEGER: Final = 1 << 53
_MAX_PRODUCT: Final = 1 << 32
"""Beyond this, llguidance's products of divisors overflow without an error."""


def is_exact(number: float) -> bool:
    """Tell whether a grammar can require exactly this number, so that every reader gets the same value."""
    if isinstance(number, int) or number.is_integer():
        return abs(number) <= _MAX_EXACT_INTEGER
    digits = Decimal(str(number)).normalize()
    return len(digits.as_tuple().digits) <= _DIGITS and digits.adjusted() >= -_MAX_DECIMALS


def inner_bound(bound: float, *, is_upper: bool, is_strict: bool = False) -> float:
    """Return the outermost number with 15 digits that a bound allows.

    :param is_upper: whether the bound is a maximum
    :param is_strict: whether the bound is exclusive
    """
    exact = Decimal(str(bound))
    unit = Decimal(1).scaleb(max(exact.adjusted() - _DIGITS + 1, -_MAX_DECIMALS))
    steps = _CONTEXT.divide(exact, unit).to_integral_value(ROUND_FLOOR if is_upper else ROUND_CEILING)
    inner = _CONTEXT.multiply(steps, unit)
    if is_strict and inner == exact:
        inner += -unit if is_upper else unit
    return int(inner) if inner == inner.to_integral_value() else float(inner)


def have_common_multiple(divisors: Sequence[float]) -> bool:
    """Tell whether llguidance can compute the least common multiple of divisors; always for a single one."""
    if len(divisors) == 1:
        return True
    exact = [Decimal(str(abs(divisor))) for divisor in divisors]
    num_decimals = max(-int(each.normalize().as_tuple().exponent) for each in exact)
    if num_decimals > _MAX_DECIMALS:
        return False
    scaled = [int(each.scaleb(max(num_decimals, 0))) for each in exact]
    return math.lcm(*scaled) * max(scaled) < _MAX_PRODUCT
