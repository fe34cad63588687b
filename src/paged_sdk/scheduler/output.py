"""What the scheduler hands to the runner for one step, and what it says of the step afterwards."""

from __future__ import annotations

from attrs import define, frozen

from paged_sdk.kv.manager import KvCopy
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.response import FinishReason

__all__ = ["Advance", "ScheduledSequence", "SchedulerOutput"]


# Neither of the two that a step makes one of per sequence is frozen: that takes three times as long, and a step of 256
# sequences has 0.3 ms.


@define(eq=False)
class ScheduledSequence:
    """One row of a step: some tokens of one sequence.

    :ivar start: tokens of the sequence computed before the step, or being computed by steps under way
    :ivar num_new_tokens: tokens to compute: ``sequence.token_ids[start : start + num_new_tokens]``, the last of which
        may be the one that the previous step samples
    :ivar num_samples: tokens to sample after the last of them: 0 if the chunk does not reach the sequence's end, n if
        it completes the prompt of a request with n choices, otherwise 1
    :ivar kv_ids: block table, or ``[slot]`` when contiguous; the sequence's own list, not to be changed. Entries of
        blocks that a sliding window has left are 0 and are not to be read
    :ivar num_preemptions: of the sequence, when the row was made: one that has been preempted since is not advanced
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    num_samples: int
    kv_ids: list[int]
    num_preemptions: int

    @property
    def end(self) -> int:
        """Tokens of the sequence with KV after the step."""
        return self.start + self.num_new_tokens


@frozen(eq=False)
class SchedulerOutput:
    """One step. The order on the device: copies, then released slots may go, then the rows' writes.

    :ivar scheduled: the rows, those that only generate before chunks of prompts; if there are none, nothing is to be
        executed and only ``dropped`` can have entries
    :ivar copies: to be done before the rows' writes; paged: whole blocks; contiguous: the first ``num_tokens`` tokens
    :ivar released: contiguous only: slots whose storage may be dropped
    :ivar dropped: ended here with "length", because they outgrew the KV memory
    :ivar finished_seq_ids: ended since the previous output: their state may be forgotten
    """

    scheduled: list[ScheduledSequence]
    copies: list[KvCopy]
    released: list[int]
    dropped: list[Sequence]
    finished_seq_ids: list[int]


@define(eq=False)
class Advance:
    """What a step gave to one sequence.

    :ivar token_ids: the tokens appended
    :ivar row: the row of ``SchedulerOutput.scheduled`` that they were sampled in
    :ivar sample: which of the row's samples
    :ivar finish_reason: why the sequence ended with them, or None
    """

    sequence: Sequence
    token_ids: list[int]
    row: int
    sample: int
    finish_reason: FinishReason | None
