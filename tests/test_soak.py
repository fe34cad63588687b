"""The short form of ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

import soak


@pytest.mark.parametrize("mode", soak.MODES)
def test_requests_that_end_in_every_way_leave_nothing(tiny_checkpoint: Path, mode: str) -> None:
    (report,) = soak.soak(tiny_checkpoint, 24, 7, [mode])
    assert not report.complaints, "\n".join(report.complaints[:10])
