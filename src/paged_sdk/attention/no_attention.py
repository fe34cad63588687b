"""Stands in for attention in models that have none, whose memory is the states of their recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.types.step import StepRow

__all__ = ["NoAttention"]


class NoAttention(AttentionBackend):
    """Keeps no keys and values, on any device, paged or not."""

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        """See :meth:`AttentionBackend.prepare`: no layer calls the step."""
        return _NoStep()

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy nothing."""

    def release(self, kv_ids: Iterable[int]) -> None:
        """Free nothing."""

    @property
    def num_bytes(self) -> int:
        """Return 0."""
        return 0


class _NoStep(AttentionStep):
    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        raise AssertionError(f"layer {layer} has attention, in a model without")

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        raise AssertionError(f"layer {layer} has attention, in a model without")
