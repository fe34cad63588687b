"""Make fake models that are still at it whatever else the machine does, until a test has seen what it wants to see."""

from __future__ import annotations

from typing import Any, Final

from paged_sdk.testing import FakeModel, fake_model

__all__ = ["SLOW_TEXT", "let_end", "slow_fake"]

SLOW_TEXT: Final = "A sentence that is said one byte after the other. " * 20


def slow_fake(**options: Any) -> FakeModel:
    """Make a model that says :data:`SLOW_TEXT`, which takes it 20 s."""
    return fake_model(SLOW_TEXT, delay=0.02, **options)


def let_end(*fakes: FakeModel) -> None:
    """Have models say at once what is left, and all that comes later."""
    for fake in fakes:
        fake._runner.hurry()
