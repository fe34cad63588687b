"""Holds a step whose hidden states are computed, for what drafts from them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.step import InsertedRows
from paged_sdk.runner.input_batch import InputBatch
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.step import StepRow

__all__ = ["ComputedStep"]


@frozen(eq=False)
class ComputedStep:
    """Holds the rows of a step, and what the model has computed of them.

    :ivar scheduled: the sequence of each row
    :ivar batch: the tokens of all rows
    :ivar hidden: ``[num_tokens, hidden_size]``, as the model's ``normed`` takes it; defined where a row asks for logits
    :ivar inserted: vectors that replace embeddings of the step's tokens; None: there are none
    """

    rows: Sequence[StepRow]
    scheduled: Sequence[ScheduledSequence]
    batch: InputBatch
    hidden: Tensor
    inserted: InsertedRows | None
