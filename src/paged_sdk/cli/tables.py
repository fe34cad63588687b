"""Formats tables of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows as lines: names on the left, numbers aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *(each.rjust(width) for each, width in zip(numbers, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
