"""Draw the table of `make bench`: one panel per metric, one bar per engine.

python -m benchmarks.plot RESULT.json FIGURE.svg
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.environments import OWN
from benchmarks.results import as_text

__all__ = ["draw"]

_COLUMNS: Final = 3
_OWN_COLOUR, _OTHER_OWN_COLOUR, _PEER_COLOUR = "#1f6feb", "#8fb8f5", "#b6bcc4"


def draw(report: dict[str, Any], target: Path) -> None:
    """Write the figure.

    :param report: the JSON object that ``benchmarks.compare`` writes
    :param target: the file to write; its suffix determines the format
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"font.size": 8, "svg.hashsalt": "benchmarks", "svg.fonttype": "none"}
    metrics = [metric for metric in report["metrics"] if any(map(_is_number, metric["median"].values()))]
    num_rows = math.ceil(len(metrics) / _COLUMNS)
    engines = list(report["engines"])
    figure, panels = plt.subplots(
        num_rows, _COLUMNS, figsize=(11, num_rows * (0.8 + 0.2 * len(engines))), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(metrics) :]:
        panel.set_axis_off()
    for panel, metric in zip(panels.flat, metrics, strict=False):
        values = [metric["median"][engine] for engine in engines]
        bars = panel.barh(engines, [value or 0 for value in values], color=[_colour(engine) for engine in engines])
        panel.bar_label(bars, ["" if value is None else as_text(value) for value in values], padding=3)
        note = "" if metric["higher_is_better"] else ", less is better"
        panel.set_title(f"{metric['title']}\n{metric['unit']}{note}")
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.xaxis.set_visible(False)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    machine = report["machine"]
    figure.suptitle(
        f"{report['model']}: {report['threads']} CPU threads, {machine['cpu']}, median of rounds: {report['rounds']}"
        + (" (quick: no measurement)" if report["quick"] else "")
    )
    # No date in the file: equal figures give equal files.
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)


def _is_number(value: object) -> bool:
    return value is not None


def _colour(engine: str) -> str:
    if engine == OWN:
        return _OWN_COLOUR
    return _OTHER_OWN_COLOUR if engine.startswith(OWN) else _PEER_COLOUR


def main(
    report: Annotated[Path, typer.Argument(help="JSON of benchmarks.compare", exists=True, dir_okay=False)],
    target: Annotated[Path, typer.Argument(help="SVG or PNG file to write")],
) -> None:
    """Draw a result."""
    draw(json.loads(report.read_text()), target)


if __name__ == "__main__":
    typer.run(main)
