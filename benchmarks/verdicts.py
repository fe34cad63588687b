"""Holds the outcome of trying a class of transformers on this engine."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["Outcome", "Verdict"]


class Verdict(Enum):
    """Names the outcomes of a class."""

    RUNS = "runs"
    REFUSED = "refused"
    UNTRIED = "not tried"
    WRONG = "wrong"


@frozen
class Outcome:
    """Holds the outcome of one class.

    :ivar reason: why the class is refused or was not tried, or what is wrong
    """

    model_type: str
    verdict: Verdict
    reason: str = ""
