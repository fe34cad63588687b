"""Defines the step that the scheduler passes to the runner, and the tokens that sequences got from it."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from attrs import define, field, frozen

from paged_sdk.kv.manager import KvCopy, StateCopy, StoredBlock
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.reading import PooledVector
from paged_sdk.types.step import AWAITED, Step, StepRow

__all__ = ["NewTokens", "ScheduledSequence", "SchedulerOutput"]


# Not frozen, which makes construction three times as slow: a step of 256 sequences makes 256 and has 0.3 ms for it.
@define(eq=False)
class ScheduledSequence:
    """Describes one row of a step: some tokens of one sequence, and drafts of the tokens that follow.

    :ivar start: how many tokens of the sequence were computed before the step or are computed by steps under way
    :ivar num_new_tokens: how many tokens to compute: a chunk of ``sequence.token_ids[start:]``, whose last token may be
        the one that the previous step samples, then the drafts
    :ivar num_samples: how many tokens to sample after the last of them: 0 if the chunk does not reach the sequence's
        end or the prompt is only read, n if it completes the prompt of a request with n choices, otherwise 1
    :ivar kv_ids: block table, or ``[slot]`` when contiguous; the sequence's own list, which must not be changed.
        Entries of blocks outside every sliding window are 0 and must not be read
    :ivar epoch: the epoch of the sequence when the row was made
    :ivar draft_token_ids: guesses at the tokens after the last known one. A token is sampled after each of them too, up
        to the first guess that is wrong
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    num_samples: int
    kv_ids: list[int]
    epoch: int
    draft_token_ids: Sequence_[int] = ()

    @property
    def end(self) -> int:
        """Return how many tokens of the sequence have KV after the step, if every draft is accepted."""
        return self.start + self.num_new_tokens

    @property
    def known_end(self) -> int:
        """Return how many tokens of the sequence have KV after the step, if no draft is accepted."""
        return self.start + self.num_new_tokens - len(self.draft_token_ids)

    @property
    def is_current(self) -> bool:
        """Return whether the row's results still count: the sequence has not ended or been preempted since."""
        return self.sequence.epoch == self.epoch


@frozen(eq=False)
class SchedulerOutput:
    """Describes one step. The device copies KV first, then frees released slots and fills restored blocks, then writes
    the rows' KV.

    :ivar scheduled: the rows, decode-only ones first, then prefill chunks; if there are none, nothing is executed and
        only ``dropped`` can have entries
    :ivar copies: KV to copy before the rows write theirs; paged: whole blocks; contiguous: the first ``num_tokens``
        tokens
    :ivar released: slots whose storage may be freed; contiguous only
    :ivar dropped: sequences that the scheduler ended with "length", because they outgrew the KV memory
    :ivar finished_seq_ids: sequences that ended since the previous output: their state may be dropped
    :ivar num_prompt_tokens: number of tokens in prefill chunks that start within a prompt; recomputed output does not
        count
    :ivar num_decodes: how many of the rows, the first ones, only decode
    :ivar state_copies: states of recurrent layers to copy, beside ``copies``
    :ivar restores: blocks to fill with stored content; paged only. If nothing runs, there may be some without rows
    :ivar withheld: rows whose sequences wait for this step's result: see :meth:`Scheduler.withhold`
    """

    scheduled: list[ScheduledSequence]
    copies: list[KvCopy]
    released: list[int]
    dropped: list[Sequence]
    finished_seq_ids: list[int]
    num_prompt_tokens: int = 0
    num_decodes: int = 0
    state_copies: list[StateCopy] = field(factory=list)
    withheld: list[ScheduledSequence] = field(factory=list)
    restores: list[StoredBlock] = field(factory=list)

    def part(self, rows: Sequence_[int]) -> SchedulerOutput:
        """Return an output with some of the rows, so that their results can be processed separately. It counts no
        prompt tokens.

        :param rows: indices into :attr:`scheduled`
        """
        scheduled = [self.scheduled[row] for row in rows]
        withheld = [row for row in self.withheld if row in scheduled]
        return SchedulerOutput(scheduled, [], [], [], [], withheld=withheld)

    def message(self) -> Step:
        """Return the step as integers and lists, which another process that holds the weights can run."""
        rows = []
        for row in self.scheduled:
            sequence, drafts = row.sequence, row.draft_token_ids
            end = row.known_end
            token_ids = sequence.token_ids[row.start : end]
            if end > len(sequence.token_ids):
                token_ids.append(AWAITED)
            token_ids += drafts
            num_logits = 1 + len(drafts) if row.num_samples else 0
            reading, second_part = sequence.request.reading, None
            if reading is not None:
                num_logits = _num_read(sequence, row)
                second_part = reading.second_part if isinstance(reading, PooledVector) else None
            elif sequence.request.sampling.prompt_logprobs is not None:
                num_logits = len(token_ids)
            rows.append(
                StepRow(
                    seq_id=sequence.seq_id,
                    start=row.start,
                    token_ids=token_ids,
                    kv_ids=row.kv_ids,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    kv_version=sequence.table.version,
                    num_logits=num_logits,
                    num_drafts=len(drafts),
                    is_long=sequence.is_long,
                    adapter=None if sequence.request.adapter is None else sequence.request.adapter.number,
                    adapter_start=sequence.request.adapter_start,
                    media=sequence.request.media,
                    state_slot=sequence.table.state_slot,
                    second_part=second_part,
                )
            )
        copies = [(copy.src, copy.dst, copy.num_tokens) for copy in self.copies]
        return Step(
            rows=rows,
            copies=copies,
            state_copies=[(copy.src, copy.dst) for copy in self.state_copies],
            released=self.released,
            finished_seq_ids=self.finished_seq_ids,
        )


def _num_read(sequence: Sequence, row: ScheduledSequence) -> int:
    """Return how many of a row's tokens, counted from the last, need hidden states for the request's reading."""
    states = sequence.request.reading.states(sequence.num_prompt_tokens) if sequence.request.reading else range(0)
    return row.end - max(row.start, states.start) if row.start < states.stop and states.start < row.end else 0


@define(eq=False)
class NewTokens:
    """Holds the tokens that a step gave to sequences, in the order of rows and samples.

    The lists are parallel: with one object per token, a step of 256 sequences triggers the garbage collector, which
    took 0.6 ms of every step.

    :ivar sequences: the sequences that have grown, each once; ``finish_reason`` is set if the last token ended the
        sequence
    :ivar token_ids: the tokens of each, at least one
    :ivar rows: index into ``SchedulerOutput.scheduled`` of the row that sampled them
    :ivar samples: by index into these lists, which of the row's samples the first token is, where it is not the first
    :ivar pinned: the sequences whose prompts are computed and held from now on
    """

    sequences: list[Sequence] = field(factory=list)
    token_ids: list[list[int]] = field(factory=list)
    rows: list[int] = field(factory=list)
    samples: dict[int, int] = field(factory=dict)
    pinned: list[Sequence] = field(factory=list)

    @property
    def num_tokens(self) -> int:
        """Return the total number of tokens."""
        return sum(map(len, self.token_ids))

    def add(self, sequence: Sequence, token_ids: list[int], row: int, sample: int = 0) -> None:
        """Add the tokens of one sequence."""
        if sample:
            self.samples[len(self.sequences)] = sample
        self.sequences.append(sequence)
        self.token_ids.append(token_ids)
        self.rows.append(row)
