"""The benchmark of the engine's own Python finds every part that it reports."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.engine_python import PARTS, measure

from paged_sdk.chat.text_processor import TextProcessor


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_every_part_of_a_step_takes_time(smollm2_text: TextProcessor, seconds: float) -> None:
    clock = asyncio.run(measure(smollm2_text, num_streams=3, num_steps=5, seconds=seconds))
    assert clock.steps == 5
    assert all(clock.nanoseconds[part] > 0 for part in PARTS)
