"""The measurement of forced tokens, on a tiny model."""

from __future__ import annotations

import asyncio
import io

from benchmarks.forced_json import FORCED, PLAIN, as_table, measure
from rich.console import Console

from paged_sdk import TextModelBuilder


def test_both_ways_are_measured(builder: TextModelBuilder) -> None:
    report = asyncio.run(measure(builder, streams=[1, 2], rounds=1, max_tokens=200))
    assert {count: set(rates) for count, rates in report.rates.items()} == {1: {FORCED, PLAIN}, 2: {FORCED, PLAIN}}
    assert all(len(speed_ups) == 1 and speed_ups[0] > 0 for speed_ups in report.speed_ups.values())
    assert report.num_different == 0
    assert report.num_tokens > report.num_forced > 0.3 * report.num_tokens
    table = io.StringIO()
    Console(file=table, width=160).print(as_table(report, "tiny"))
    assert "answers at a time" in table.getvalue()
