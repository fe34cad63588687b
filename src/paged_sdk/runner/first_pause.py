"""Holds how long a new sequence goes without drafts."""

from __future__ import annotations

from typing import Final

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "FirstPause"]

FIRST_PAUSE: Final = 16
"""Steps without drafts before a trial draft, if drafts of a sequence do not pay. Each trial doubles the pause, up to
:data:`LONGEST_PAUSE`, until drafts pay. New sequences start with the longest pause reached since drafts last paid: with
this pause for each, drafting with a third of a model's layers cost sequences of 160 tokens 5 % instead of 1 %."""
LONGEST_PAUSE: Final = 512


class FirstPause:
    """Holds the number of steps without drafts with which a new sequence starts; see :data:`FIRST_PAUSE`."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        self.num_steps: int = FIRST_PAUSE
