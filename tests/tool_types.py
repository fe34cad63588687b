"""Types that tools of tests take."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import NotRequired, TypedDict

__all__ = ["Place", "Span", "Unit"]


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(TypedDict):
    city: str
    country: NotRequired[str]


@dataclasses.dataclass
class Span:
    first: int
    last: int = 0
