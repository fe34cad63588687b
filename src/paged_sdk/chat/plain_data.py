"""Measure plain data, which messages and tools consist of: strings, numbers, lists and mappings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import frozen

__all__ = ["ITEM_CHARS", "DataSize", "TooLargeError", "measure"]

ITEM_CHARS = 16
"""The weight of a list item in characters: a pointer and, mostly, an object."""


class TooLargeError(ValueError):
    """Says that data is larger than a limit, or not plain data."""


@frozen
class DataSize:
    """Holds the size of a value. A part that occurs several times is counted each time.

    :ivar chars: total characters of all strings
    :ivar items: number of values in lists and mappings, at any depth, plus one
    :ivar depth: nesting depth of lists and mappings
    """

    chars: int
    items: int
    depth: int

    @property
    def weight(self) -> int:
        """Return the combined size in characters."""
        return self.chars + ITEM_CHARS * self.items


def measure(value: Any, *, limit: int) -> DataSize:
    """Measure nested plain data, in time bounded by the limit.

    :param limit: the largest weight
    :raises TooLargeError: the weight exceeds the limit, or the value holds something else
    """
    chars, items, deepest = 0, 1, 0
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        kind = type(part)
        inner: Iterable[object] = ()
        if kind is str:
            chars += len(part)
        elif kind is dict:
            inner = part.values()
            chars += sum([len(key) if type(key) is str else ITEM_CHARS for key in part])
        elif kind is list or kind is tuple:
            inner = part
        elif kind is int:
            chars += part.bit_length() // 3
        elif part is not None and kind is not bool and kind is not float:
            raise TooLargeError(f"it holds a {kind.__name__}")
        if inner:
            items += len(part)
            deepest = max(deepest, depth + 1)
        if chars + ITEM_CHARS * items > limit:
            raise TooLargeError("it is too large")
        for each in inner:
            if type(each) is str:
                chars += len(each)
            else:
                waiting.append((each, depth + 1))
    if chars + ITEM_CHARS * items > limit:
        raise TooLargeError("it is too large")
    return DataSize(chars, items, deepest)
