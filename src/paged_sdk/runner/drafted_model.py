"""Describes a model to what drafts for it."""

from __future__ import annotations

from attrs import frozen

from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["DraftedModel"]


@frozen(kw_only=True)
class DraftedModel:
    """Describes the model that drafts are made for.

    :ivar vocab_size: its vocabulary size
    :ivar max_tokens: its context length
    :ivar gamma: maximum number of drafts per sequence and step
    :ivar times: times of its steps
    :ivar balance: time that drafts have gained and lost so far
    """

    vocab_size: int
    max_tokens: int
    gamma: int
    times: StepTimes
    balance: DraftBalance
