"""Holds logprobs as sampling returns them, without tensors, so that the engine and tests need none."""

from __future__ import annotations

from attrs import frozen

__all__ = ["RawLogprobs"]


@frozen
class RawLogprobs:
    """Holds the logprobs (natural logarithm) at one position of a text.

    :ivar token_id: the token chosen there, or the prompt's own
    :ivar logprob: the logprob of that token
    :ivar top: the likeliest tokens and their logprobs, likeliest first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
