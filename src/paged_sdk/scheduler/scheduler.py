"""Schedules the tokens that each sequence computes in the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_store import BlockReader
from paged_sdk.kv.manager import KvManager
from paged_sdk.scheduler.admission import SHORT_PROMPT_DIVISOR, Admission
from paged_sdk.scheduler.awaited_images import ImageGate
from paged_sdk.scheduler.awaited_inputs import AwaitedInputs
from paged_sdk.scheduler.draft_account import VerifiedDrafts
from paged_sdk.scheduler.output import NewTokens, ScheduledSequence, SchedulerOutput
from paged_sdk.scheduler.pins import Pins
from paged_sdk.scheduler.running_sequences import RunningSequences
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.step_costs import StepCosts
from paged_sdk.scheduler.waiting_queue import WaitingQueue
from paged_sdk.types.response import FinishReason

__all__ = ["Scheduler"]

_NONE: Final[Mapping[int, Iterable[int]]] = MappingProxyType({})


class Scheduler:
    """Schedules steps by continuous batching, under one token budget per step.

    There is no prefill and no decode phase: each sequence has tokens that are not computed yet, and a step computes
    some of them. Sequences that only decode get their one token of the budget first, then prompts that were begun, then
    new ones from the queue; but a share of each step is kept for short prompts, so that these do not wait for the end
    of long ones. Memory goes by rank (overdue, priority, arrival): a sequence that needs a block takes it from the last
    running one by rank, which is preempted: it loses its KV and is recomputed later, except for the blocks that are
    found in the prefix cache.

    Progress is guaranteed: the running sequence that is first by rank is never preempted and always gets a token, since
    it may take the whole memory; a sequence that outgrows even that is ended with "length".

    If steps overlap on the device, a step may be scheduled while the previous one is in flight. A sequence is then
    scheduled as if its token in flight were known, unless that token is certainly its last, or is withheld. If the
    token turns out to end the sequence, the row that was scheduled since is ignored.

    :param images: encodes the images of prompts; None: prompts have no images
    :param store: reads cached blocks that have left the pool; None: nothing is stored
    :ivar costs: is told after each :meth:`update` how long the step took, and knows by it how many prompt tokens a step
        may compute, and how many drafts pay
    :ivar pins: the sequences whose prompts' KV is held
    """

    def __init__(
        self, config: EngineConfig, kv: KvManager, images: ImageGate | None = None, store: BlockReader | None = None
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = WaitingQueue()
        self._awaited = AwaitedInputs(images, store, kv, self._waiting)
        self.pins: Pins = Pins(config, kv)
        self._running = RunningSequences(config, kv, self._awaited, self.pins)
        self._admission = Admission(config, kv, self._waiting, self._running, self._awaited)
        self.costs: StepCosts = StepCosts(config.max_slowdown)
        self._finished_seq_ids: list[int] = []

    @property
    def num_running(self) -> int:
        """Return how many sequences hold KV, pinned ones aside."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._awaited)

    @property
    def num_awaiting_images(self) -> int:
        """Return how many of the waiting sequences wait for images."""
        return self._awaited.num_for_images

    @property
    def is_stalled(self) -> bool:
        """Return whether a step with nothing to compute is not to be repeated until images or stored blocks are ready,
        or other requests arrive or end: sequences in the queue then wait for the seats of those that wait for blocks.
        """
        is_queue_held_up = not self._waiting or self._awaited.num_seats > 0
        return not self._running and is_queue_held_up and self._awaited.none_ready

    @property
    def decoding(self) -> list[Sequence]:
        """Return the running sequences with exactly one token to compute, which is known, and none in flight: these can
        have drafts.
        """
        return [
            sequence
            for sequence in self._running
            if sequence.num_scheduled == sequence.num_computed_tokens == len(sequence.token_ids) - 1
            and sequence.request.generates
        ]

    @property
    def num_preemptions(self) -> int:
        """Return how often a sequence has lost its KV to others since the start."""
        return self._running.num_preemptions

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        :raises QueueFullError: if ``max_queue`` sequences are waiting
        :raises ContextLengthError: if the prompt can never fit, with one more token if the request generates
        :raises PinLimitError: if the prompt is to be pinned, and pinned sequences would hold too much
        :raises InvalidRequestError: for an empty prompt, more choices than sequences can run, or a pin without a prefix
            cache of blocks alone
        """
        self._admission.check(sequence, self.num_waiting)
        if sequence.request.is_pinned:
            self.pins.reserve(sequence)
        sequence.max_length = min(sequence.max_length, self._config.max_model_len)
        self._running.queue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that waits, runs or is pinned, and free its memory at once. Those that have ended are ignored.

        A step in flight may still hold a row of it, which ``update`` ignores.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.PINNED:
            self.pins.drop(sequence)
        elif sequence.status is SequenceStatus.FINISHED:
            return
        self.pins.release(sequence)
        self._awaited.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.epoch += 1
        sequence.finish_reason = reason
        self._finished_seq_ids.append(sequence.seq_id)

    def schedule(self) -> SchedulerOutput:
        """Choose the rows of the next step and allocate KV memory for them.

        Each output must be passed to ``update``, in the order of steps: before the next call or, where steps overlap,
        after it. In the latter case rows with several samples, whose sequences fork, must be withheld or updated first.
        """
        dropped: list[Sequence] = []
        self._awaited.take_ready()
        if self._waiting:
            self._admission.admit_short()
        decodes, chunks, budget = self._continue_running(dropped)
        chunks += self._admit_waiting(budget, beside=0 if chunks else len(decodes))
        self._awaited.note_step(len(decodes))
        if not (decodes or chunks):
            # A step without rows is not executed: copies and finished sequences go with the next one that is. Restores
            # come after copies, of which there are none if nothing runs; then there may be no step before all are read.
            restores = [] if self._running else self._kv.take_restores()
            return SchedulerOutput([], [], [], dropped, [], restores=restores)
        finished, self._finished_seq_ids = self._finished_seq_ids, []
        num_prompt_tokens = sum(row.num_new_tokens for row in chunks if row.start < row.sequence.num_prompt_tokens)
        return SchedulerOutput(
            decodes + chunks,
            self._kv.take_copies(),
            self._kv.take_released(),
            dropped,
            finished,
            num_prompt_tokens,
            len(decodes),
            state_copies=self._kv.take_state_copies(),
            restores=self._kv.take_restores(),
        )

    def withhold(self, output: SchedulerOutput, rows: Iterable[int]) -> None:
        """Schedule nothing for some sequences until a step is updated, because their next token is not on the device.
        To be called before the next step is scheduled.

        :param rows: indices of rows that sample
        """
        for row in map(output.scheduled.__getitem__, rows):
            if not row.draft_token_ids:  # a sequence with drafts is never scheduled ahead
                row.sequence.length -= 1
                output.withheld.append(row)

    def forget(self, sequence: Sequence) -> None:
        """Withdraw the KV of a sequence that is about to end from the cache: it contains NaN. Pinned sequences that
        share it are computed again.
        """
        self._kv.forget(sequence.table)
        self._running.recompute_pins(only_lost=True)

    def recompute_pins(self) -> None:
        """Have all pinned sequences computed again, since the model is about to change."""
        self._running.recompute_pins(only_lost=False)

    def preempt_all(self) -> None:
        """Preempt all running sequences after a step has failed: they wait, and recompute their KV. The results of
        earlier steps must be updated first.
        """
        for sequence in list(self._running):
            self._running.preempt(sequence)

    def update(
        self, output: SchedulerOutput, sampled: list[list[int]], forced: Mapping[int, Iterable[int]] = _NONE
    ) -> NewTokens:
        """Add the sampled tokens of a step to their sequences, and end those that are complete.

        :param sampled: for each row of ``output.scheduled`` its ``num_samples`` tokens; for a row with drafts the
            accepted ones and the token sampled after them. A row that failed has none; its sequence does not change,
            and the caller finishes it
        :param forced: maps a row to the indices of those of its tokens that were the only ones a constraint allowed
        """
        for row in output.withheld:
            if row.is_current:
                row.sequence.length += 1
        new_tokens = NewTokens()
        # The common case, one token per row, is inlined: with 256 rows, a call for each took 50 us.
        sequences, given, rows = new_tokens.sequences.append, new_tokens.token_ids.append, new_tokens.rows.append
        for index, (row, token_ids) in enumerate(zip(output.scheduled, sampled, strict=True)):
            sequence = row.sequence
            if sequence.epoch != row.epoch or (row.num_samples and not token_ids):
                continue
            if row.num_samples == 1 and not row.draft_token_ids:
                sequence.num_computed_tokens = num_computed = row.start + row.num_new_tokens
                own = sequence.token_ids
                own.append(token_ids[0])
                sequences(sequence)
                given(token_ids)
                rows(index)
                if num_computed >= sequence.table.next_commit:
                    self._kv.commit(sequence.table, own, num_computed)
                if token_ids[0] in sequence.request.stop_token_ids:
                    self.finish(sequence, "stop")
                elif len(own) >= sequence.max_length:
                    self.finish(sequence, "length")
            elif row.draft_token_ids:
                accepted = self._accept(row, token_ids)
                num_forced = sum(place < len(accepted) - 1 for place in forced.get(index, ()))
                num_drafts = len(row.draft_token_ids)
                self.costs.add_verified(VerifiedDrafts(sequence.seq_id, num_drafts, len(accepted) - 1, num_forced))
                new_tokens.add(sequence, accepted, index)
            else:
                sequence.num_computed_tokens = row.end
                self._kv.commit(sequence.table, sequence.token_ids, row.end)
                if not sequence.request.generates and row.end == sequence.num_prompt_tokens:
                    if not sequence.request.is_pinned:
                        self.finish(sequence, "stop")
                    elif self._running.pin(sequence):
                        new_tokens.pinned.append(sequence)
                for sample, choice in enumerate(self._running.fork(row) if row.num_samples else ()):
                    token, reason = choice.append(token_ids[sample : sample + 1])
                    new_tokens.add(choice, token, index, sample)
                    if reason is not None:
                        self.finish(choice, reason)
        return new_tokens

    def _accept(self, row: ScheduledSequence, token_ids: list[int]) -> list[int]:
        """Add the accepted drafts and the token sampled after them to the sequence.

        :returns: the tokens up to the one that ends the sequence, if one does
        """
        sequence = row.sequence
        token_ids, reason = sequence.append(token_ids)
        # The KV of rejected drafts lies after the computed tokens, where the next step overwrites it.
        num_computed = row.known_end + len(token_ids) - 1
        sequence.num_computed_tokens = sequence.num_scheduled = num_computed
        sequence.length = len(sequence.token_ids)
        self._kv.commit(sequence.table, sequence.token_ids, num_computed)
        if reason is not None:
            self.finish(sequence, reason)
        return token_ids

    def _continue_running(
        self, dropped: list[Sequence]
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence], int]:
        """Make rows for the running sequences.

        :param dropped: receives the sequences that outgrew the memory; this method ends them. Sequences that outgrew
            :attr:`EngineConfig.rope_switch` are requeued to recompute their KV
        :returns: decode-only rows, prefill chunks, and the remaining prompt budget
        """
        decodes: list[ScheduledSequence] = []
        chunks: list[ScheduledSequence] = []
        budget = self._config.max_num_batched_tokens
        prompt_budget: int | None = None
        kept = 0  # part of the prompt budget reserved for short prompts
        outgrown: list[Sequence] = []
        # A preemption in this loop removes the last sequence of the list that is iterated over.
        for sequence in self._running:
            length, start = sequence.length, sequence.num_scheduled
            num_wanted = length - start
            if length >= sequence.end_length:
                if length == len(sequence.token_ids):  # no token is in flight: it has outgrown memory or rope_switch
                    (outgrown if self._running.may_grow(sequence) else dropped).append(sequence)
                continue
            if budget <= 0 or num_wanted == 0:  # 0: drafts of the sequence are being verified
                continue
            if num_wanted > 1:
                if prompt_budget is None:
                    prompt_budget = self._prompt_budget(start)
                    kept = min(self._admission.num_short_tokens(), prompt_budget // SHORT_PROMPT_DIVISOR)
                spared = 0 if num_wanted <= self._admission.most_short else kept
                num_wanted = min(num_wanted, prompt_budget - spared, budget)
                if num_wanted <= 0:
                    continue
                num_wanted = sequence.chunk_end_after(start + num_wanted) - start
            table = sequence.table
            if start + num_wanted > table.capacity:
                num_wanted = self._running.make_room(sequence, start, num_wanted)
                if num_wanted == 0:
                    continue
            budget -= num_wanted
            if start + 1 < length or start < sequence.num_prompt_tokens:
                if prompt_budget is not None:
                    prompt_budget -= num_wanted
                    if length - start <= self._admission.most_short:
                        kept = max(kept - num_wanted, 0)
                chunks.append(_row(sequence, start, num_wanted))
                continue
            sequence.num_scheduled, sequence.length = length, length + 1
            row = ScheduledSequence(sequence, start, 1, 1, table.ids, sequence.epoch)
            decodes.append(row)
            if sequence.draft_token_ids:
                budget -= self._add_drafts(row, budget)
        for sequence in dropped:
            self.finish(sequence, "length")
        for sequence in outgrown:
            if sequence.status is SequenceStatus.RUNNING:  # not preempted in the loop
                self._running.requeue(sequence)
        if self.costs.pace is not None and prompt_budget is not None:
            budget = min(budget, prompt_budget)
        return decodes, chunks, budget

    def _admit_waiting(self, budget: int, *, beside: int) -> list[ScheduledSequence]:
        """Admit waiting sequences while there is budget, and make their rows.

        :param beside: how many sequences decode in the step, if it computes no other prompts; otherwise 0
        """
        rows: list[ScheduledSequence] = []
        if budget <= 0 or not self._waiting:
            return rows
        pace = self.costs.pace if beside else None
        seconds = 0.0 if pace is None else pace.prompt_seconds(beside, self._num_prompts(beside))
        if pace is not None and not seconds:
            return rows
        for sequence in self._admission.admit():
            start, length = sequence.num_scheduled, len(sequence.token_ids)
            if pace is not None and not rows:
                budget = min(budget, pace.tokens(seconds, start))
            wanted = sequence.chunk_end_after(start + min(budget, length - start)) - start
            num_new = self._kv.grow(sequence.table, start, wanted)
            if num_new == 0 and self.pins:  # it is alone, and they have the rest of the memory
                num_new = self._running.make_room(sequence, start, wanted)
            assert num_new > 0, f"{sequence} was admitted without room"
            num_new = sequence.chunk_end_before(start + num_new) - start
            if num_new <= 0:
                continue
            rows.append(_row(sequence, start, num_new))
            budget -= num_new
            if budget <= 0:
                break
        return rows

    def _prompt_budget(self, depth: int) -> int:
        """Return how many tokens of running prompts the step may compute.

        :param depth: how many tokens of the first of these prompts have KV already
        """
        num_decodes = self._num_decodes()
        most = self._config.max_num_batched_tokens - num_decodes
        pace = self.costs.pace
        if pace is None or not num_decodes:
            return most
        seconds = pace.prompt_seconds(num_decodes, self._num_prompts(num_decodes))
        return min(most, pace.tokens(seconds, depth)) if seconds else 0

    def _num_prompts(self, num_decodes: int) -> int:
        """Count the running prompts, and the waiting ones for which there are seats."""
        num_running = len(self._running)
        return num_running - num_decodes + min(len(self._waiting), self._config.max_num_seqs - num_running)

    def _num_decodes(self) -> int:
        """Count the running sequences that only decode: every step reserves budget for their tokens."""
        return sum(each.length - each.num_scheduled == 1 and each.length < each.end_length for each in self._running)

    def _add_drafts(self, row: ScheduledSequence, most: int) -> int:
        """Add drafts to a sequence's row, as many as fit its maximum length and the free memory.

        Drafts take no memory from other sequences: they preempt none, and while requests wait they get no new block.

        :param most: how many drafts the budget allows
        :returns: how many drafts were added
        """
        sequence = row.sequence
        drafts, sequence.draft_token_ids = sequence.draft_token_ids, []
        if sequence.length != len(sequence.token_ids) + 1:
            return 0  # the token that the drafts follow is not known yet
        # The token sampled after the last draft is part of the output, too.
        most = min(most, sequence.end_length - sequence.length, len(drafts))
        if self._waiting:
            most = min(most, sequence.table.capacity - row.start - 1)
        most = self._kv.grow(sequence.table, row.start, 1 + most, num_drafts=most) - 1 if most > 0 else 0
        if most < 1:
            return 0
        row.draft_token_ids = drafts[:most]
        row.num_new_tokens += most
        row.kv_ids = sequence.table.ids  # growing may have replaced the list
        sequence.length -= 1
        return most


def _row(sequence: Sequence, start: int, num_new_tokens: int) -> ScheduledSequence:
    """Make a row of prompt tokens, or of tokens that are recomputed after a preemption."""
    is_last = start + num_new_tokens == sequence.length
    num_samples = sequence.num_choices if is_last and sequence.request.generates else 0
    if num_samples:
        assert num_samples == 1 or not sequence.num_awaited, f"{sequence} is to be forked first"
        sequence.length += 1
    sequence.num_scheduled = start + num_new_tokens
    return ScheduledSequence(sequence, start, num_new_tokens, num_samples, sequence.table.ids, sequence.epoch)
