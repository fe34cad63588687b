"""The short form of ``make soak``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

import soak

LONG: Final = ("paged", "no prefix cache")  # other modes are paged, too


@pytest.mark.parametrize("mode", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in soak.MODES])
def test_requests_that_end_in_every_way_leave_nothing(tiny_checkpoint: Path, mode: str) -> None:
    (report,) = soak.soak(tiny_checkpoint, 24, 7, [mode])
    assert not report.complaints, "\n".join(report.complaints[:10])
