"""Say how many tokens a step may guess ahead of a text."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, as_int

__all__ = ["MOST_DRAFTS", "SpeculativeConfig"]

MOST_DRAFTS: Final = 1024
"""No model is so sure of its next thousand tokens; a larger number is a slip."""


@frozen
class SpeculativeConfig:
    """Turns on drafts: guesses at the tokens that follow a text, several of which the model verifies in one step.

    How many there are is chosen anew for each text and step, from how many were right and from what steps take on this
    machine. A text never depends on it.

    :ivar gamma: the most tokens that a step guesses for one text, 1 to 1,024
    :raises ConfigError: at construction
    """

    gamma: int = field(default=16, converter=as_int, validator=IntAtLeast(1, maximum=MOST_DRAFTS))
