"""Validate settings: each validator raises :class:`ConfigError` naming the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from attrs import Attribute

from paged_sdk.errors import ConfigError


def _name(instance: object, attribute: Attribute[Any]) -> str:
    return f"{type(instance).__name__}.{attribute.name}"


class IntAtLeast:
    """Accepts an int (not a bool) of at least ``minimum``; None too if ``optional``."""

    def __init__(self, minimum: int, *, optional: bool = False) -> None:
        self.minimum = minimum
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < self.minimum:
            allowed = f"an int >= {self.minimum}" + (" or None" if self.optional else "")
            raise ConfigError.of(_name(instance, attribute), value, allowed)


class NumberBetween:
    """Accepts a finite number within bounds; an open bound is excluded. None too if ``optional``."""

    def __init__(
        self,
        low: float,
        high: float = math.inf,
        *,
        low_open: bool = False,
        optional: bool = False,
    ) -> None:
        self.low = low
        self.high = high
        self.low_open = low_open
        self.optional = optional

    def __call__(self, instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and self.optional:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number:
            assert isinstance(value, int | float)
            if (value > self.low if self.low_open else value >= self.low) and value <= self.high:
                return
        raise ConfigError.of(_name(instance, attribute), value, self.allowed())

    def allowed(self) -> str:
        lower = f"{'>' if self.low_open else '>='} {self.low:g}"
        upper = "" if math.isinf(self.high) else f" and <= {self.high:g}"
        return f"a finite number {lower}{upper}" + (" or None" if self.optional else "")
