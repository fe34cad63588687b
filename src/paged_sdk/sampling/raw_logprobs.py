"""Holds logprobs as plain numbers, so that the engine and tests need no tensors."""

from __future__ import annotations

from attrs import frozen

__all__ = ["RawLogprobs"]


@frozen
class RawLogprobs:
    """Holds the logprobs (natural logarithm) at one position of a sequence.

    :ivar token_id: the token at this position, sampled or of the prompt
    :ivar logprob: the logprob of that token
    :ivar top: the likeliest tokens and their logprobs, likeliest first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
