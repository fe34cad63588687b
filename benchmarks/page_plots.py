"""Draw the figures of the benchmarks' pages from the pages' tables: each image shows the table before it.

python -m benchmarks.page_plots

A panel is a row of the table, a bar an engine. The files are small SVGs that follow the reader's choice of light or
dark colors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from attrs import frozen

__all__ = ["DOCS", "Metric", "draw", "figures", "figures_of_pages"]

DOCS: Final = Path(__file__).parents[1] / "docs"

_IMAGE: Final = re.compile(r"^!\[([^\]]*)\]\(((?:\.\./)?plots/[\w.-]+\.svg)\)$")
_NUMBER: Final = re.compile(r"\*{0,2}([\d,]+(?:\.\d+)?)\*{0,2}")
_NOT_ENGINES: Final = re.compile(r"own / |ratio|aim")
_LESS_IS_BETTER: Final = re.compile(r", (?:ms|s|MiB)$")

_COLUMNS: Final = 3
_WIDTH, _MARGIN, _GAP = 760, 16, 18
_TITLE, _BAR, _STEP = 34, 11, 16
_LABEL, _VALUE = 78, 44
_STYLE: Final = """\
text { font: 11px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.note { fill: #59636e; }
.card { fill: #ffffff; stroke: #d1d9e0; }
.own { fill: #2f6fdb; }
.peer { fill: #b4bdc8; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8eb; }
  .note { fill: #9aa3ad; }
  .card { fill: #23262e; stroke: #3d444d; }
  .own { fill: #6ea8fe; }
  .peer { fill: #6b7480; }
}
"""


@frozen
class Metric:
    """Holds one metric of each engine.

    :ivar title: the metric's name and unit
    :ivar values: the table's numbers by engine
    """

    title: str
    values: dict[str, str]

    @property
    def less_is_better(self) -> bool:
        """Return whether the metric is a time or a size."""
        return _LESS_IS_BETTER.search(self.title) is not None

    def share(self, engine: str) -> float:
        """Return an engine's number as a fraction of the largest."""
        numbers = {each: float(value.replace(",", "")) for each, value in self.values.items()}
        return numbers[engine] / max(numbers.values())


def figures(page: str) -> Iterator[tuple[str, str, list[Metric]]]:
    """Yield each image's path, title and metrics.

    :raises ValueError: no row of the table before an image has numbers of two engines
    """
    table: list[list[str]] = []
    is_in_table = False
    for line in page.splitlines():
        if line.startswith("|"):
            table = [*table, _cells(line)] if is_in_table else [_cells(line)]
        is_in_table = line.startswith("|")
        if (image := _IMAGE.match(line)) is not None:
            metrics = _metrics(table)
            if not metrics:
                raise ValueError(f"{image[2]}: there is nothing to compare in the table before it")
            yield image[2], image[1], metrics


def figures_of_pages() -> dict[Path, str]:
    """Return the SVG of each figure of the benchmarks' pages, by the file that the page shows."""
    found: dict[Path, str] = {}
    for page in (DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md"))):
        for path, title, metrics in figures(page.read_text(encoding="utf-8")):
            found[(page.parent / path).resolve()] = draw(title, metrics)
    return found


def draw(title: str, metrics: Sequence[Metric]) -> str:
    """Return the SVG of a figure."""
    panel = (_WIDTH - 2 * _MARGIN - (_COLUMNS - 1) * _GAP) // _COLUMNS
    rows = [metrics[first : first + _COLUMNS] for first in range(0, len(metrics), _COLUMNS)]
    parts, top = [], _MARGIN + 22
    for row in rows:
        for column, metric in enumerate(row):
            parts.append(_panel(metric, _MARGIN + column * (panel + _GAP), top, panel))
        top += _TITLE + _STEP * max(len(metric.values) for metric in row) + _GAP
    height = math.ceil(top)
    head = f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 10}">{escape(title)}</text>'
    card = f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    body = "\n".join((f"<title>{escape(title)}</title>", f"<style>\n{_STYLE}</style>", card, head, *parts))
    return f"{opening}\n{body}\n</svg>\n"


def main() -> None:
    """Draw all figures of the pages."""
    for target, drawn in figures_of_pages().items():
        target.parent.mkdir(exist_ok=True)
        target.write_text(drawn, encoding="utf-8")
        print(target.relative_to(DOCS))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _metrics(table: Sequence[Sequence[str]]) -> list[Metric]:
    if len(table) < 3:
        return []
    (_, *heads), _, *rows = table
    others = [place for place, head in enumerate(heads) if _NOT_ENGINES.match(head)]
    engines = heads[: min(others, default=len(heads))]
    found: list[Metric] = []
    for title, *cells in rows:
        numbers = {engine: _NUMBER.fullmatch(cell) for engine, cell in zip(engines, cells, strict=False)}
        values = {engine: each[1] for engine, each in numbers.items() if each is not None}
        if len(values) > 1:
            found.append(Metric(title, values))
    return found


def _panel(metric: Metric, left: int, top: int, width: int) -> str:
    name, _, unit = metric.title.rpartition(", ")
    note = f"{unit}, less is better" if metric.less_is_better else unit
    parts = [
        f'<text class="title" x="{left}" y="{top + 10}">{escape(name)}</text>',
        f'<text class="note" x="{left}" y="{top + 24}">{escape(note)}</text>',
    ]
    room = width - _LABEL - _VALUE
    for place, (engine, value) in enumerate(metric.values.items()):
        y = top + _TITLE + place * _STEP
        length = max(1.0, round(room * metric.share(engine), 1))
        kind = "own" if engine.startswith("paged_sdk") else "peer"
        parts += [
            f'<text x="{left}" y="{y + 9}">{escape(_short(engine))}</text>',
            f'<rect class="{kind}" x="{left + _LABEL}" y="{y}" width="{length}" height="{_BAR}" rx="2"/>',
            f'<text x="{left + _LABEL + length + 4:.1f}" y="{y + 9}">{value}</text>',
        ]
    return "\n".join(parts)


def _short(engine: str) -> str:
    """Return an engine's name without its version, which the table has."""
    return re.sub(r" \d[\d.]*$", "", engine).replace("OpenVINO GenAI", "OpenVINO")


if __name__ == "__main__":
    main()
