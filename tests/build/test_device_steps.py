"""What the log says of steps that were recorded, and of those that could not be."""

from __future__ import annotations

from typing import cast

import pytest

from paged_sdk.build.device_steps import OnProgress, _recorded
from paged_sdk.runner.decode_graphs import DecodeGraphs


class Graphs:
    """Stands for recorded steps of up to 8 rows."""

    largest = 8

    def __init__(self, *errors: Exception, fails: bool = False) -> None:
        self.errors = list(errors)
        self._fails = fails

    def check(self) -> None:
        if self._fails:
            raise RuntimeError("another result\nand where it was")


def recorded(graphs: Graphs) -> object:
    def make(on_progress: OnProgress) -> DecodeGraphs:
        on_progress(1, 1)
        return cast("DecodeGraphs", graphs)

    return _recorded("decode steps", "rows", make, visible=False)


def test_recorded_steps_are_kept_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paged_sdk")
    graphs = Graphs()
    assert recorded(graphs) is graphs
    (said,) = caplog.messages
    assert said.startswith("Decode steps of up to 8 rows recorded in ")


def test_steps_that_larger_ones_stand_for_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(RuntimeError("out of memory"))
    assert recorded(graphs) is graphs
    assert "Some decode steps are padded: theirs could not be recorded (out of memory)." in caplog.messages


def test_steps_that_cannot_be_recorded_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    assert recorded(Graphs(fails=True)) is None
    (said,) = caplog.messages
    assert said == "Decode steps are launched one operation at a time: they cannot be recorded (another result)."
