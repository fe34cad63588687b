"""Detect that a replica's engine hangs, which Ray Serve's health checks alone do not notice."""

from __future__ import annotations

import asyncio

from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.remote.hang_detector import HangDetector
from paged_sdk.worker.worker import Worker

__all__ = ["until_hung"]


async def until_hung(worker: Worker, step_seconds: float | None) -> str:
    """Wait until an engine hangs, possibly for ever. A stopped process is detected by Ray Serve's health checks.

    :param step_seconds: the engine hangs if a step takes this long; None: no limit
    :returns: the reason, for the error
    """
    detector = HangDetector(HangLimits(silent_seconds=None, step_seconds=step_seconds))
    while detector.round_seconds is not None:
        await asyncio.sleep(detector.round_seconds)
        detector.note_step(worker.running_step)
        if (reason := detector.next_round()) is not None:
            return reason
    await asyncio.Event().wait()  # no limit: wait for ever
    raise AssertionError
