"""Write columns of figures for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write rows down in columns: names on the left, and numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *(each.rjust(width) for each, width in zip(numbers, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
