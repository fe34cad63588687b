"""Who computes what in the next step."""

from __future__ import annotations

import time
from bisect import insort

from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import ContextLengthError, InvalidRequestError, QueueFullError
from paged_sdk.kv.manager import KvManager, Prefix
from paged_sdk.scheduler.output import NewTokens, ScheduledSequence, SchedulerOutput
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue, is_overdue, rank
from paged_sdk.types.response import FinishReason

__all__ = ["Scheduler"]

LOOKAHEAD = 64
"""Waiting sequences that one step considers, so that its cost does not grow with the queue."""


class Scheduler:
    """Continuous batching under one token budget per step.

    There is no prefill and no decode phase: each sequence has tokens that are not computed yet, and a step computes
    some of them. Sequences that only generate come first in the budget with their one token, then prompts that were
    begun, then new ones from the queue. Memory goes by rank (overdue, priority, arrival): who needs a block takes it
    from the last of those behind it, which is preempted: it loses its KV and is recomputed later, as far as its blocks
    are not found in the prefix cache.

    Why it always gets on: the first by rank of those running is never preempted and always gets a token, since it
    may take the whole memory; what outgrows even that is ended with "length".

    A step may be scheduled while the one before it is under way, if the device can hand the tokens that one samples to
    the next: a sequence goes on as if it had got its token, unless that token is its last for sure. If the token then
    turns out to end the text, the row that has been scheduled since is passed over.
    """

    def __init__(self, config: EngineConfig, kv: KvManager) -> None:
        self._config = config
        self._kv = kv
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._finished_seq_ids: list[int] = []
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold KV."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences whose next step has one token to compute, which is known: those that drafts may
        follow."""
        return [
            sequence
            for sequence in self._running
            if sequence.num_in_flight == 0 and sequence.num_computed_tokens + 1 == len(sequence.token_ids)
        ]

    @property
    def num_preemptions(self) -> int:
        """Sequences whose KV was given up for others, since the start."""
        return self._num_preemptions

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        :raises QueueFullError: if ``max_queue`` sequences wait
        :raises ContextLengthError: if the prompt, and one token after it, can never fit
        :raises InvalidRequestError: for an empty prompt, or more choices than sequences can run
        """
        request_id, num_tokens = sequence.request.request_id, len(sequence.token_ids)
        limit = min(self._config.max_model_len - 1, self._kv.max_sequence_tokens)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, at most {limit} fit",
                request_id=request_id,
                num_tokens=num_tokens,
                limit=limit,
            )
        if num_tokens == 0:
            raise InvalidRequestError.of("prompt", sequence.token_ids, "at least one token")
        if sequence.num_choices > self._config.max_num_seqs:
            allowed = f"at most max_num_seqs = {self._config.max_num_seqs}"
            raise InvalidRequestError.of("n_choices", sequence.num_choices, allowed)
        if len(self._waiting) >= self._config.max_queue:
            raise QueueFullError(
                f"{self._config.max_queue} requests are waiting, which is the limit",
                request_id=request_id,
                limit=self._config.max_queue,
            )
        sequence.max_length = min(sequence.max_length, self._config.max_model_len)
        self._waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now, waiting or running; its memory is free at once. Nothing happens if it has ended.

        A step in flight may still hold a row of it, which ``update`` passes over.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._kv.free(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            return
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._finished_seq_ids.append(sequence.seq_id)

    def schedule(self) -> SchedulerOutput:
        """Choose the rows of the next step and make room for them.

        ``update`` must follow, in the order of the steps: before the next call or, where the device hands on what it
        samples, after it. A row of several samples, whose sequence forks, has to be updated first.
        """
        dropped: list[Sequence] = []
        rows, budget = self._continue_running(dropped)
        rows += self._admit_waiting(budget)
        if not rows:
            # Nobody executes such a step: what it would have carried waits for the next.
            return SchedulerOutput([], [], [], dropped, [])
        finished, self._finished_seq_ids = self._finished_seq_ids, []
        return SchedulerOutput(rows, self._kv.take_copies(), self._kv.take_released(), dropped, finished)

    def update(self, output: SchedulerOutput, sampled: list[list[int]]) -> NewTokens:
        """Take in the results of a step.

        :param sampled: per row of ``output.scheduled`` its ``num_samples`` tokens; of a row with drafts those that were
            accepted, and the token sampled after them. A row that failed has none; its sequence stays as it was, for
            the caller to finish
        """
        new_tokens = NewTokens()
        running = SequenceStatus.RUNNING
        for index, (row, token_ids) in enumerate(zip(output.scheduled, sampled, strict=True)):
            sequence = row.sequence
            # As row.is_current says: a property's call would be a tenth of this loop.
            if sequence.status is not running or sequence.num_preemptions != row.num_preemptions:
                continue
            num_samples = row.num_samples
            if num_samples and not token_ids:
                continue
            sequence.num_in_flight -= row.num_new_tokens
            num_computed = row.start + row.num_new_tokens
            reason: FinishReason | None = None
            if num_samples == 1:
                sequence.num_awaited -= 1
                token_ids, reason = self._append(sequence, token_ids)
                new_tokens.add(sequence, token_ids, index, 0)
                if row.draft_token_ids:
                    # The KV of rejected drafts lies beyond what counts as computed, where the next step writes.
                    sequence.is_verifying = False
                    num_computed = row.known_end + len(token_ids) - 1
            sequence.num_computed_tokens = num_computed
            if num_computed >= sequence.table.next_commit:
                self._kv.commit(sequence.table, sequence.token_ids, num_computed)
            if reason is not None:
                self.finish(sequence, reason)
            elif num_samples > 1:
                sequence.num_awaited -= 1
                for sample, choice in enumerate(self._fork(row)):
                    token, reason = self._append(choice, token_ids[sample : sample + 1])
                    new_tokens.add(choice, token, index, sample)
                    if reason is not None:
                        self.finish(choice, reason)
        return new_tokens

    def _continue_running(self, dropped: list[Sequence]) -> tuple[list[ScheduledSequence], int]:
        """Rows for the running sequences, and what they leave of the budget.

        :param dropped: gets those that outgrew the memory, and end here
        """
        decodes: list[ScheduledSequence] = []
        chunks: list[ScheduledSequence] = []
        budget, limit = self._config.max_num_batched_tokens, self._kv.max_sequence_tokens
        prompt_budget: int | None = None
        for sequence in tuple(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            length = len(sequence.token_ids) + sequence.num_awaited
            if sequence.is_verifying:
                continue  # where its text goes on is known when that step is taken in
            if length > limit or (sequence.num_awaited and length >= sequence.max_length):
                if not sequence.num_awaited:
                    self.finish(sequence, "length")
                    dropped.append(sequence)
                continue
            start = sequence.num_computed_tokens + sequence.num_in_flight
            num_wanted = 1
            if start + 1 < length:
                if prompt_budget is None:
                    prompt_budget = self._config.max_num_batched_tokens - self._num_decodes()
                num_wanted = min(length - start, prompt_budget)
            if num_wanted > budget:
                num_wanted = budget
            if num_wanted <= 0:
                continue
            if start + num_wanted > sequence.table.capacity:
                num_wanted = self._make_room(sequence, start, num_wanted)
                if num_wanted == 0:
                    continue
            budget -= num_wanted
            row = _row(sequence, start, num_wanted, length)
            if start + 1 == length:
                if sequence.draft_token_ids:
                    budget -= self._add_drafts(row, min(budget, limit - length))
                decodes.append(row)
            else:
                assert prompt_budget is not None
                prompt_budget -= num_wanted
                chunks.append(row)
        return decodes + chunks, budget

    def _admit_waiting(self, budget: int) -> list[ScheduledSequence]:
        """Rows for waiting sequences that there is budget, a seat and memory for."""
        rows: list[ScheduledSequence] = []
        if not self._waiting:
            return rows
        num_seats = self._config.max_num_seqs - sum(sequence.num_choices for sequence in self._running)
        for sequence in self._waiting.candidates(LOOKAHEAD):
            if budget == 0 or num_seats == 0:
                break
            prefix = self._kv.match(sequence.table, sequence.token_ids)
            if prefix.awaited:
                continue
            if sequence.num_choices <= num_seats and self._fits(sequence, prefix, num_seats):
                row = self._admit(sequence, prefix, budget)
                rows.append(row)
                budget -= row.num_new_tokens
                num_seats -= sequence.num_choices
            elif is_overdue(sequence) or sequence.first_scheduled_at is not None:
                break  # nobody passes one that has waited its turn, or had it and was preempted
        return rows

    def _fits(self, sequence: Sequence, prefix: Prefix, num_seats: int) -> bool:
        """Whether there is memory for all its tokens, and a block more for each sequence that will go on growing.

        Without these blocks the next steps would take back what this one gives: 200 requests of 550 tokens on a pool
        of 3,200 tokens computed 37 % of their tokens again after preemptions; with them 18 %, in as many steps.
        """
        num_growing = self._config.max_num_seqs - num_seats + sequence.num_choices - 1
        return not self._running or self._kv.fits(prefix, len(sequence.token_ids), num_growing=num_growing)

    def _num_decodes(self) -> int:
        """Running sequences that only generate: their tokens have their place in every step."""
        return sum(
            len(each.token_ids) + each.num_awaited - each.num_computed_tokens - each.num_in_flight == 1
            for each in self._running
        )

    def _admit(self, sequence: Sequence, prefix: Prefix, budget: int) -> ScheduledSequence:
        self._waiting.remove(sequence)
        self._waiting.count_passed_by(sequence)
        self._kv.attach(sequence.table, prefix, sequence.token_ids)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = time.monotonic()
            sequence.num_cached_tokens = prefix.num_tokens
        insort(self._running, sequence, key=rank)
        length = len(sequence.token_ids)
        num_new = self._kv.grow(sequence.table, prefix.num_tokens, min(budget, length - prefix.num_tokens))
        assert num_new > 0, f"{sequence} was admitted without room"
        return _row(sequence, prefix.num_tokens, num_new, length)

    def _add_drafts(self, row: ScheduledSequence, most: int) -> int:
        """Let a row verify the drafts of its sequence, as far as they fit its text and the free memory.

        Guesses take no memory that others may want: nobody is preempted for them, and while requests wait they take no
        new block.

        :param most: drafts that the budget and the whole memory have a place for
        :returns: how many there are
        """
        sequence = row.sequence
        drafts, sequence.draft_token_ids = sequence.draft_token_ids, []
        # The token sampled after the last draft belongs to the text, too.
        most = min(most, sequence.max_length - len(sequence.token_ids) - 1, len(drafts))
        if row.num_samples != 1 or sequence.num_awaited > 1 or sequence.num_in_flight > 1 or most < 1:
            return 0  # what they follow is not known yet
        if self._waiting:
            most = min(most, sequence.table.capacity - row.start - 1)
        most = self._kv.grow(sequence.table, row.start, 1 + most) - 1
        if most < 1:
            return 0
        row.draft_token_ids = drafts[:most]
        row.num_new_tokens += most
        row.kv_ids = sequence.table.ids  # growing may have made another list
        sequence.num_in_flight += most
        sequence.is_verifying = True
        return most

    def _make_room(self, sequence: Sequence, start: int, num_wanted: int) -> int:
        """Room for at most ``num_wanted`` more tokens, at the cost of those behind; 0 if it was itself the last."""
        while not (num_granted := self._kv.grow(sequence.table, start, num_wanted)):
            last = self._running[-1]
            if last is sequence and sequence.num_in_flight:
                break  # when the step under way is taken in, its window may give blocks back
            self._preempt(last)
            if last is sequence:
                break
        return num_granted

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self._running) > 1, f"{sequence} has the whole memory and no room"
        self._running.remove(sequence)
        self._kv.free(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
        # A token that is under way is lost, and will be sampled again: the same one.
        sequence.num_computed_tokens = sequence.num_in_flight = sequence.num_awaited = 0
        sequence.is_verifying = False
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _append(self, sequence: Sequence, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Add tokens, up to the one that ends the text.

        :returns: those that were added, and why the text ends with them; None: it goes on
        """
        stop_token_ids, own = sequence.request.stop_token_ids, sequence.token_ids
        for count, token_id in enumerate(token_ids, start=1):
            own.append(token_id)
            if token_id in stop_token_ids:
                return token_ids[:count], "stop"
            if len(own) >= sequence.max_length:
                return token_ids[:count], "length"
        return token_ids, None

    def _fork(self, row: ScheduledSequence) -> list[Sequence]:
        """A sequence for each of a row's samples, the first its own; they are independent from now on."""
        sequence = row.sequence
        siblings = [
            sequence.fork(choice, self._kv.fork(sequence.table, sequence.num_computed_tokens))
            for choice in range(1, row.num_samples)
        ]
        for sibling in siblings:
            insort(self._running, sibling, key=rank)
        sequence.num_choices = 1
        return [sequence, *siblings]


def _row(sequence: Sequence, start: int, num_new_tokens: int, length: int) -> ScheduledSequence:
    """:param length: tokens of the sequence, the awaited ones included"""
    num_samples = sequence.num_choices if start + num_new_tokens == length else 0
    if num_samples:
        assert num_samples == 1 or not sequence.num_awaited, f"{sequence} is to be forked first"
        sequence.num_awaited += 1
    sequence.num_in_flight += num_new_tokens
    return ScheduledSequence(sequence, start, num_new_tokens, num_samples, sequence.table.ids, sequence.num_preemptions)
