"""Admits waiting sequences to a step while seats and KV memory last."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import ContextLengthError, InvalidRequestError, QueueFullError
from paged_sdk.kv.manager import KvManager, Prefix
from paged_sdk.scheduler.awaited_inputs import AwaitedInputs
from paged_sdk.scheduler.running_sequences import RunningSequences
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import WaitingQueue, is_overdue

__all__ = ["LOOKAHEAD", "SHORT_PROMPT_DIVISOR", "Admission"]

LOOKAHEAD = 64
"""Waiting sequences considered per step, so that a step's cost does not grow with the queue."""

SHORT_PROMPT_DIVISOR = 4
"""A prompt is short if its remaining tokens are at most ``max_num_batched_tokens / SHORT_PROMPT_DIVISOR``. While longer
prompts are under way, the same share of each step is kept for short ones. Beside two prompts of 8,000 tokens, a prompt
of 30 tokens got its first token 26 steps after its arrival; with the share it gets it in the next step, and any number
of short prompts take at most a quarter of each step from the long ones."""


class Admission:
    """Moves sequences from the queue to the running ones, in the queue's order.

    A sequence that does not fit is passed by later ones, unless it is overdue or was preempted.

    :param waiting: the queue
    :param running: receives the admitted sequences
    :param awaited: takes sequences out of the queue that have to wait for images or stored blocks first
    :ivar most_short: a prompt with at most this many tokens left to compute is short
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KvManager,
        waiting: WaitingQueue,
        running: RunningSequences,
        awaited: AwaitedInputs,
    ) -> None:
        self.most_short: int = config.max_num_batched_tokens // SHORT_PROMPT_DIVISOR
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._awaited = awaited

    def check(self, sequence: Sequence, num_waiting: int) -> None:
        """Check that a new sequence may wait, and can be admitted some time.

        :param num_waiting: how many sequences wait already
        :raises QueueFullError: see :meth:`Scheduler.add`, also for the other errors
        """
        request_id, num_tokens = sequence.request.request_id, len(sequence.token_ids)
        # The last generated token takes a position of the context, but needs no KV.
        positions = self._config.max_model_len - sequence.request.generates
        limit = min(positions, self._kv.max_sequence_tokens)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, at most {limit} fit",
                request_id=request_id,
                field="prompt",
                num_tokens=num_tokens,
                limit=limit,
            )
        if num_tokens == 0:
            raise InvalidRequestError.of("prompt", sequence.token_ids, "at least one token")
        if sequence.num_choices > self._config.max_num_seqs:
            allowed = f"at most max_num_seqs = {self._config.max_num_seqs}"
            raise InvalidRequestError.of("n_choices", sequence.num_choices, allowed)
        if num_waiting >= self._config.max_queue:
            raise QueueFullError(
                f"{self._config.max_queue} requests are waiting, which is the limit",
                request_id=request_id,
                limit=self._config.max_queue,
            )

    def admit(self) -> Iterator[Sequence]:
        """Yield sequences, each admitted when the iterator reaches it, as long as seats and memory last."""
        for sequence, prefix in self._that_fit():
            self._admit(sequence, prefix)
            yield sequence

    def admit_short(self) -> None:
        """Admit short prompts while longer ones, which would take the whole budget, are under way.

        Priorities hold: no short prompt is admitted beside a long one of higher priority, unless the short one is
        overdue.
        """
        long = next((each for each in self._running if each.length - each.num_scheduled > self.most_short), None)
        num_tokens = self.num_short_tokens()
        if long is None or num_tokens >= self.most_short:
            return
        # The long prompts' chunks of this step rank first; they must not preempt the sequences admitted here.
        num_taken = self._config.max_num_batched_tokens // self._config.block_size + 1
        for sequence, prefix in self._that_fit(num_taken):
            if not is_overdue(sequence) and sequence.request.options.priority < long.request.options.priority:
                break
            num_wanted = len(sequence.token_ids) - prefix.num_tokens
            if num_wanted > self.most_short:
                continue
            self._admit(sequence, prefix)
            num_tokens += num_wanted
            if num_tokens >= self.most_short:
                break

    def num_short_tokens(self) -> int:
        """Count the tokens that running short prompts have left to compute."""
        wanted = (each.length - each.num_scheduled for each in self._running)
        return sum(count for count in wanted if 1 < count <= self.most_short)

    def _that_fit(self, num_taken: int = 0) -> Iterator[tuple[Sequence, Prefix]]:
        """Yield sequences that may be admitted, each with its cached prefix.

        :param num_taken: blocks that this step takes for other sequences
        """
        num_seats = self._config.max_num_seqs - sum(sequence.num_choices for sequence in self._running)
        for sequence in self._waiting.candidates(LOOKAHEAD):
            num_free = num_seats - self._awaited.num_seats
            if num_free <= 0:
                return
            prefix = self._kv.match(sequence.table, sequence.token_ids)
            if prefix.awaited:
                continue
            num_growing = self._config.max_num_seqs - num_seats + sequence.num_choices - 1 + num_taken
            if sequence.num_choices <= num_free and self._fits(sequence, prefix, num_growing):
                if self._awaited.must_wait(sequence, prefix):
                    continue
                yield sequence, prefix
                if sequence.status is SequenceStatus.RUNNING:
                    num_seats -= sequence.num_choices
            elif is_overdue(sequence) or sequence.first_scheduled_at is not None:
                return

    def _fits(self, sequence: Sequence, prefix: Prefix, num_growing: int) -> bool:
        """Return whether all tokens of the sequence fit, plus one more block for each sequence that keeps growing,
        and those that are kept for sequences that wait for stored blocks.

        Without these blocks the next steps would preempt the admitted sequence: 200 requests of 550 tokens on a pool of
        3,200 tokens recomputed 37 % of their tokens after preemptions; with the blocks 18 %, in as many steps.
        """
        if not self._running and not self._awaited.num_seats:
            return True
        num_kept = num_growing + self._awaited.num_blocks
        return self._kv.fits(prefix, len(sequence.token_ids), num_growing=num_kept)

    def _admit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Move a waiting sequence to the running ones, with ``prefix`` as its first KV."""
        self._waiting.remove(sequence)
        self._waiting.count_passed_by(sequence)
        self._awaited.admitted(sequence)
        self._kv.attach(sequence.table, prefix, sequence.token_ids)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = sequence.num_scheduled = prefix.num_tokens
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = time.monotonic()
            sequence.num_cached_tokens = prefix.num_tokens
        self._running.add(sequence)
