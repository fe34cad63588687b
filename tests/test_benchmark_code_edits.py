"""The measurement of drafts, on a tiny model."""

from __future__ import annotations

import asyncio
import io

from benchmarks.code_edits import PLAIN, PREDICTION, SUFFIX, Asked, as_table, measure
from benchmarks.edits import EDITS
from benchmarks.protocol import Prompt
from rich.console import Console
from rich.progress import Progress

from paged_sdk import TextModelBuilder


def test_the_edits_are_of_code_that_is_there() -> None:
    assert len({(edit.path, edit.name) for edit in EDITS}) == len(EDITS) >= 20
    for edit in EDITS:
        assert 400 < len(edit.code) < 3000, edit
        assert edit.code in edit.question
        assert edit.prediction in edit.question
        renamed = edit.instruction.split("`")[1] if edit.instruction.startswith("Rename") else edit.name
        assert renamed in edit.code, edit


def test_every_way_is_measured(builder: TextModelBuilder) -> None:
    requests = [
        Asked("edits", Prompt("", [5, 6, 7, 8] * 6), "a b c"),
        Asked("prose", Prompt("", [9, 10, 11])),
    ]
    with Progress(console=Console(file=io.StringIO())) as progress:
        report = asyncio.run(
            measure(builder, requests, {}, gamma=4, max_tokens=24, streams=[2], rounds=1, progress=progress)
        )
    ways = {what: set(rates) for what, rates in report.rates.items()}
    assert ways == {
        "edits": {PLAIN, SUFFIX, PREDICTION},
        "prose": {PLAIN, SUFFIX},
        "edits, 2 streams": {PLAIN, SUFFIX},
        "prose, 2 streams": {PLAIN, SUFFIX},
    }
    assert all(rate > 0 for rates in report.rates.values() for values in rates.values() for rate in values)
    assert set(report.different.values()) == {0}
    speed_up = report.speed_up("edits", SUFFIX)
    assert speed_up is not None
    assert speed_up > 0
    table = io.StringIO()
    Console(file=table, width=160).print(as_table(report, "tiny"))
    assert "prose, 2 streams" in table.getvalue()
