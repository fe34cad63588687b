"""The figures of the benchmarks' pages show what their tables say."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from benchmarks.page_plots import DOCS, Metric, draw, figures, figures_of_pages

TABLE = """
| | paged_sdk | other 1.2 | third | own / best peer | aim |
|---|---|---|---|---|---|
| decode, tok/s | 1,000 | **500** | - | 2.0 | 1.5 |
| start, s | 2.0 | 0.5 | more than 60 s | | |
| cold / cached, ms | 220 / 14 | 2 / 1 | 3 / 1 | | |
| alone, ms | 3 | | | | |

![What is shown](plots/shown.svg)
"""


def test_a_figure_has_the_numbers_of_the_table_before_it() -> None:
    ((path, title, (decode, start)),) = figures(TABLE)
    assert (path, title) == ("plots/shown.svg", "What is shown")
    assert decode == Metric("decode, tok/s", {"paged_sdk": "1,000", "other 1.2": "500"})
    assert start == Metric("start, s", {"paged_sdk": "2.0", "other 1.2": "0.5"})
    assert (decode.less_is_better, start.less_is_better) == (False, True)
    assert [decode.share("other 1.2"), start.share("other 1.2")] == [0.5, 0.25]


def test_bars_are_as_long_as_their_shares() -> None:
    ((_, title, metrics),) = figures(TABLE)
    root = ET.fromstring(draw(title, metrics))
    bars = [each for each in root.iter() if each.get("class") in ("own", "peer")]
    lengths = [float(bar.get("width", "")) for bar in bars]
    assert [bar.get("class") for bar in bars] == ["own", "peer"] * 2
    assert lengths[0] == lengths[2]
    assert lengths[1] / lengths[0] == pytest.approx(0.5, abs=0.01)
    assert lengths[3] / lengths[2] == pytest.approx(0.25, abs=0.01)
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert {"1,000", "500", "2.0", "0.5", "s, less is better", "other"} <= set(texts)


def test_an_image_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        list(figures("Text.\n\n![None](plots/none.svg)\n"))


def test_the_files_are_those_of_the_pages() -> None:
    """Where this fails, ``python -m benchmarks.page_plots`` draws them anew."""
    there = {file.resolve(): file.read_text(encoding="utf-8") for file in (DOCS / "plots").iterdir()}
    assert there == figures_of_pages()
