"""Say what became of a class of transformers that was tried here."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["Outcome", "Verdict"]


class Verdict(Enum):
    """Says what becomes of a class."""

    RUNS = "runs"
    REFUSED = "refused"
    UNTRIED = "not tried"
    WRONG = "wrong"


@frozen
class Outcome:
    """Holds what was found of one class.

    :ivar reason: why it is refused or was not tried, or what is wrong
    """

    model_type: str
    verdict: Verdict
    reason: str = ""
