"""Measure plain data: what messages and tools are made of."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ITEM_CHARS", "DataSize", "TooLargeError", "measure"]

ITEM_CHARS = 16
"""An item of a list counts as many characters: a pointer and, mostly, an object."""


class TooLargeError(ValueError):
    """Says that data is larger than a limit, or not plain."""


@frozen
class DataSize:
    """Says what a value holds; each part of it counts as often as it occurs.

    :ivar chars: of all strings
    :ivar items: values in lists and mappings, at any depth, and the value itself
    :ivar depth: of lists and mappings in each other
    """

    chars: int
    items: int
    depth: int

    @property
    def weight(self) -> int:
        """Return a size in characters."""
        return self.chars + ITEM_CHARS * self.items


def measure(value: object, *, limit: int) -> DataSize:
    """Measure strings, numbers, lists and mappings in each other, in time that the limit bounds.

    :raises TooLargeError: the weight is beyond the limit, or something else is in there
    """
    chars, items, deepest = 0, 1, 0
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        kind = type(part)
        if kind is str:
            assert isinstance(part, str)
            chars += len(part)
        elif kind is dict:
            assert isinstance(part, dict)
            chars += sum(len(key) if type(key) is str else ITEM_CHARS for key in part)
            items += len(part)
            _check(chars + ITEM_CHARS * items, limit)
            waiting.extend((inner, depth + 1) for inner in part.values())
        elif kind is list or kind is tuple:
            assert isinstance(part, list | tuple)
            items += len(part)
            _check(chars + ITEM_CHARS * items, limit)
            waiting.extend((inner, depth + 1) for inner in part)
        elif kind is int:
            assert isinstance(part, int)
            chars += part.bit_length() // 3
        elif part is not None and kind is not bool and kind is not float:
            raise TooLargeError(f"it holds a {kind.__name__}")
        deepest = max(deepest, depth)
        _check(chars + ITEM_CHARS * items, limit)
    return DataSize(chars, items, deepest)


def _check(weight: int, limit: int) -> None:
    if weight > limit:
        raise TooLargeError("it is too large")
