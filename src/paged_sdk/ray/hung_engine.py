"""Notice that a replica's engine has hung, where Ray Serve asks for its health alone."""

from __future__ import annotations

import asyncio

from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.remote.pulse import Pulse
from paged_sdk.worker.worker import Worker

__all__ = ["until_hung"]


async def until_hung(worker: Worker, step_seconds: float | None) -> str:
    """Wait until an engine has hung, for ever if it does not. A process that is stopped is found by Ray Serve.

    :param step_seconds: a step that takes so long has hung; None: none has
    :returns: why, to be said of it
    """
    pulse = Pulse(HangLimits(silent_seconds=None, step_seconds=step_seconds))
    while pulse.round_seconds is not None:
        await asyncio.sleep(pulse.round_seconds)
        pulse.note_step(worker.running_step)
        if (reason := pulse.next_round()) is not None:
            return reason
    await asyncio.Event().wait()  # nothing is limited
    raise AssertionError
