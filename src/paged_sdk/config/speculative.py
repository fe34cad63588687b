"""Configure speculative decoding."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, as_int, is_bool

__all__ = ["MOST_DRAFTS", "SpeculativeConfig"]

MOST_DRAFTS: Final = 1024
"""A larger number must be a typo: a thousand drafts are never all accepted."""


@frozen
class SpeculativeConfig:
    """Turns on speculative decoding: tokens are guessed ahead, and the model verifies several of them in one step.

    The number of guesses is chosen for each sequence and step, from how many were right and how long steps take on this
    machine. The output never depends on it.

    :ivar gamma: maximum number of draft tokens per sequence and step, 1 to 1,024
    :ivar mtp: whether the layer that a checkpoint has for multi-token prediction drafts where the text repeats nothing
    :raises ConfigError: at construction
    """

    gamma: int = field(default=16, converter=as_int, validator=IntAtLeast(1, maximum=MOST_DRAFTS))
    mtp: bool = field(default=False, validator=is_bool)
