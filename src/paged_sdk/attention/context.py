"""What travels through a model with the tokens of one step."""

from __future__ import annotations

from attrs import frozen

from paged_sdk.attention.backend import AttentionStep

__all__ = ["StepContext"]


@frozen(kw_only=True)
class StepContext:
    """Per-step data, passed as an argument so that two models can live in one process.

    :ivar attention: attention for this step's rows
    """

    attention: AttentionStep
