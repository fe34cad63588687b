"""Runs inference steps: each schedules a batch, submits it, updates sequences and publishes output."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from attrs import evolve, frozen

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.isq import IsqType
from paged_sdk.engine.events import Listener, Outbox
from paged_sdk.engine.metrics import Metrics
from paged_sdk.engine.output import OutputProcessor
from paged_sdk.errors import InvalidRequestError, NumericalError, RequestFailedError, shown
from paged_sdk.kv.block_store import BlockStore
from paged_sdk.kv.manager import KvManager
from paged_sdk.logs import get_logger
from paged_sdk.runner.image_queue import ImageQueue
from paged_sdk.runner.output import PendingStep, Runner, RunnerOutput, StepMemoryError
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.stats import ModelStats

__all__ = ["Engine"]

_log = get_logger(__name__)


@frozen(eq=False)
class _Submitted:
    """Holds a step that was submitted to the runner and whose results are not all processed.

    :ivar at: when its preparation began, in seconds of the monotonic clock
    :ivar drafting_seconds: how long making its drafts took
    :ivar late_rows: indices of the rows to process when the device is done; None: all rows
    :ivar num_early_tokens: the number of tokens of the rows that were processed early
    """

    output: SchedulerOutput
    step: PendingStep
    at: float
    drafting_seconds: float = 0.0
    late_rows: list[int] | None = None
    num_early_tokens: int = 0


class Engine:
    """Joins the scheduler to the runner. Not thread-safe: one thread, the worker's, calls it.

    :param scheduler: decides what each step computes
    :param kv: the scheduler's KV manager
    :param runner: computes the steps
    :param tokenizer: detokenizes the text in which stop strings are searched
    :param proposer: proposes draft tokens for the runner to verify; None: no speculative decoding
    :param images: the queue in which images of prompts are encoded; None: the model takes no images
    :param blocks: stores the prefix cache's blocks outside the pool; None: nothing is stored
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvManager,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        proposer: Proposer | None = None,
        images: ImageQueue[Any] | None = None,
        blocks: BlockStore | None = None,
    ) -> None:
        self._images = images
        self._blocks = blocks
        self._scheduler = scheduler
        self._kv = kv
        self._runner = runner
        self._proposer = proposer
        self._output = OutputProcessor(tokenizer)
        self._metrics = Metrics()
        self._next_seq_id = 0
        self._under_way: _Submitted | None = None
        self._computes_nothing = False
        self._last_end = 0.0
        self._recomputed: set[int] = set()  # ids of sequences whose step ran out of memory once
        self._retired_adapters: set[int] = set()
        self._retiring_adapters: dict[int, Callable[[], object]] = {}

    @property
    def has_work(self) -> bool:
        return self._output.num_requests > len(self._scheduler.pins) or self._under_way is not None

    @property
    def is_stalled(self) -> bool:
        """Tell whether all requests await images or stored blocks, and the last step had nothing to compute."""
        return self._computes_nothing and self._scheduler.is_stalled

    def on_inputs_ready(self, callback: Callable[[], object]) -> None:
        """Set a callback, which other threads call whenever an image that requests wait for is encoded, or stored
        blocks have been read.
        """
        for source in (self._images, self._blocks):
            if source is not None:
                source.on_ready = callback

    def submit(self, request: Request, listener: Listener, outbox: Outbox) -> None:
        """Queue a request.

        :param listener: receives the request's output
        :param outbox: collects that output in each step; the engine's caller delivers it
        :raises QueueFullError: too many requests are waiting
        :raises InvalidRequestError: its adapter has been unloaded since it was prepared
        """
        if request.adapter is not None and request.adapter.number in self._retired_adapters:
            raise InvalidRequestError(
                f"the adapter {shown(request.adapter.name)} was unloaded before this request was queued",
                field="adapter",
                value=request.adapter.name,
                allowed="a loaded adapter",
                advice="unload it after the calls that use it: one with many texts queues only a few of them at a time",
            )
        assert request.language is None or request.grammar is not None, "its grammar was to be compiled on the way here"
        root = Sequence(self._next_seq_id, request)
        state = self._output.begin(root, listener, outbox)
        self._scheduler.add(root)
        # Nothing below raises, so either both the scheduler and the output know the request, or neither.
        self._next_seq_id += request.num_choices
        self._output.add(state)
        self._computes_nothing = False

    def abort(self, request_id: str) -> None:
        """End a request with "canceled" and free its KV; no effect if it has ended already."""
        self._end_request(request_id)
        self._computes_nothing = False  # another may take its seat
        self._let_adapters_go()

    def _end_request(self, request_id: str) -> None:
        for sequence in self._output.cancel(request_id, time.monotonic()):
            self._scheduler.finish(sequence, "canceled")

    def retire_adapter(self, number: int, on_idle: Callable[[], object]) -> None:
        """Refuse new requests with an adapter, release its pinned prefixes, and call ``on_idle`` once, when no
        unfinished request uses it or the engine is closed.
        """
        self._retired_adapters.add(number)
        self._retiring_adapters[number] = on_idle
        self._let_adapters_go()

    def step(self) -> None:
        """Submit one batch, and put the results of finished batches into the outboxes of their requests.

        If steps overlap on the device, this call leaves one batch in flight: the next call prepares and submits the
        successor before it waits for that batch, so that the device never waits for Python. Sequences whose tokens the
        host samples meanwhile are not in the successor.
        """
        start = time.monotonic()
        drafting_seconds = 0.0
        if self._proposer is not None:
            self._draft(self._proposer)
            drafting_seconds = time.monotonic() - start
        output = self._scheduler.schedule()
        if self._proposer is not None:
            self._proposer.forget(output.finished_seq_ids)
        if self._recomputed:
            self._recomputed.difference_update(output.finished_seq_ids)
        for sequence in output.dropped:  # a lone sequence outgrew the pool; its text is kept
            self._output.end(sequence, "length", start)
        earlier, self._under_way = self._under_way, None
        if output.scheduled:
            try:
                step = self._runner.submit(output)
            except StepMemoryError as error:
                if earlier is not None:
                    self._take_in(earlier)
                self._recompute(output, error)
                return
            self._under_way = _Submitted(output, step, start, drafting_seconds)
            self._scheduler.withhold(output, step.withheld_rows)
        elif self._blocks is not None and not self._scheduler.num_running:
            self._blocks.restore(output.restores)  # also frees the memory without which no more blocks are read
        self._computes_nothing = earlier is None and self._under_way is None
        if earlier is not None:
            self._take_in(earlier)
        if self._under_way is not None:
            if not self._under_way.step.overlaps:
                self._take_in(self._under_way)
                self._under_way = None
            elif self._under_way.step.early_rows:
                self._under_way = self._take_in_early(self._under_way)
        self._let_adapters_go()

    def _recompute(self, output: SchedulerOutput, error: StepMemoryError) -> None:
        """Recover from a step that ran out of memory: retry its sequences once, and end their requests if that fails.

        All sequences are preempted and recompute their KV, so that the steps' need of memory grows gradually.
        """
        _log.warning("%s (%r): its sequences are recomputed", error, error.__cause__)
        for row in output.scheduled:
            sequence, request_id = row.sequence, row.sequence.request.request_id
            if not row.is_current:
                continue
            if sequence.seq_id not in self._recomputed:
                self._recomputed.add(sequence.seq_id)
                continue
            failure = RequestFailedError(f"request {request_id} failed: {error}", request_id=request_id)
            failure.__cause__ = error.__cause__
            for each in self._output.fail(request_id, failure):
                self._scheduler.finish(each, "canceled")
        self._scheduler.preempt_all()
        self._let_adapters_go()

    def _let_adapters_go(self) -> None:
        for sequence in [each for each in self._scheduler.pins if _uses(each, self._retiring_adapters)]:
            self._end_request(sequence.request.request_id)
        for number in [each for each in self._retiring_adapters if not self._output.uses_adapter(each)]:
            self._retiring_adapters.pop(number)()

    def _draft(self, proposer: Proposer) -> None:
        """Ask the proposer for drafts for the sequences that are decoding."""
        sequences = self._scheduler.decoding
        if sequences:
            try:
                for sequence, drafts in zip(sequences, proposer.propose(sequences), strict=True):
                    sequence.draft_token_ids = drafts
            except Exception:
                _log.exception("the draft proposer failed: generation continues without drafts")
                self._proposer = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, its stored blocks included; live sequences keep their KV, and pinned ones stay."""
        self._forget_prefixes()
        if self._blocks is not None:
            self._blocks.clear()

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        """Requantize the weights. There must be no requests but pinned prefixes, which are computed again afterwards:
        KV comes from the old weights.

        :param check_cancelled: called from time to time; an exception that it raises ends the work and the engine
        :raises EngineDeadError: requantizing failed, and the old weights could not be restored
        :raises ModelLoadError: requantizing failed, and the old weights are in use
        """
        assert not self.has_work, "KV of requests would be that of other weights"
        self._scheduler.recompute_pins()
        self._forget_prefixes()
        self._scheduler.costs.forget()
        self._runner.requantize(isq, check_cancelled)

    def _forget_prefixes(self) -> None:
        self._scheduler.pins.reset_prefix_cache()
        if self._proposer is not None:
            self._proposer.reset()

    def stats(self) -> ModelStats:
        """Return a snapshot of the counters."""
        usage, metrics, drafts = self._kv.usage, self._metrics, self._scheduler.costs.drafts
        return ModelStats(
            blocks_total=usage.total,
            blocks_used=usage.used,
            blocks_cached=usage.cached,
            blocks_free=usage.free,
            blocks_pinned=self._scheduler.pins.num_blocks,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            awaiting_images=self._scheduler.num_awaiting_images,
            prefix_queries=self._kv.prefix_queries,
            prefix_hits=self._kv.prefix_hits,
            prefix_restored=self._kv.prefix_restored,
            preemptions=self._scheduler.num_preemptions,
            steps=metrics.steps,
            prompt_tokens=metrics.prompt_tokens,
            completion_tokens=metrics.completion_tokens,
            drafted_tokens=drafts.num_drafted,
            accepted_tokens=drafts.num_accepted,
            forced_tokens=self._output.num_forced,
            draft_speed_up=drafts.speed_up,
            prompt_tok_per_sec=metrics.prompt_tok_per_sec,
            completion_tok_per_sec=metrics.completion_tok_per_sec,
        )

    def close(self) -> None:
        """Free the tensors and close the files; the engine is unusable afterwards."""
        self._proposer = self._under_way = None
        self._runner.close()
        while self._retiring_adapters:
            self._retiring_adapters.popitem()[1]()

    def _take_in(self, submitted: _Submitted) -> None:
        """Wait for the results of a step and publish them."""
        output, result = submitted.output, submitted.step.result()
        now, rows = time.monotonic(), submitted.late_rows
        if rows is None:
            num_tokens = self._update(output, result, now)
        else:
            num_tokens = self._update(output.part(rows), result.part(rows), now) + submitted.num_early_tokens
        # If two steps overlap, their common time is counted once.
        start, self._last_end = max(submitted.at, self._last_end), now
        self._count(output, num_tokens, start, now, submitted.drafting_seconds)

    def _take_in_early(self, submitted: _Submitted) -> _Submitted:
        """Publish the rows of a step whose results are known before the device is done.

        :returns: the step with the remaining rows
        """
        early, step, output = submitted.step.early_rows, submitted.step, submitted.output
        num_tokens = self._update(output.part(early), step.early_result().part(early), time.monotonic())
        late = sorted(set(range(len(output.scheduled))) - set(early))
        return evolve(submitted, late_rows=late, num_early_tokens=num_tokens)

    def _update(self, output: SchedulerOutput, result: RunnerOutput, now: float) -> int:
        """Append the tokens of finished rows to their sequences and send them to the listeners.

        :returns: the number of tokens
        """
        self._end_failed(output, result)
        new_tokens = self._scheduler.update(output, result.token_ids, result.forced)
        for sequence in self._output.process(new_tokens, output, result, now):
            self._scheduler.finish(sequence, "stop")  # the scheduler does not check stop strings
        if self._blocks is not None and (published := self._kv.take_published()):
            self._blocks.store(published)
        return new_tokens.num_tokens

    def _end_failed(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """End the requests whose rows failed, such as those with non-finite logits; other requests continue.

        After non-finite logits, the sequence's KV is also removed from the prefix cache, which protects later requests
        with the same prefix. The KV of tokens before the NaN is affected, too: attention multiplies the masked value by
        a weight of 0, and 0 * NaN is NaN.
        """
        for row, error in result.failed.items():
            if not output.scheduled[row].is_current:  # scheduled before the sequence's end was known
                continue
            for sequence in self._output.fail(output.scheduled[row].sequence.request.request_id, error):
                if isinstance(error, NumericalError):
                    self._scheduler.forget(sequence)
                    if self._blocks is not None:
                        self._blocks.forget(sequence.table.hashes)
                self._scheduler.finish(sequence, "canceled")

    def _count(
        self, output: SchedulerOutput, completion_tokens: int, start: float, end: float, drafting_seconds: float
    ) -> None:
        self._metrics.add_step(
            start=start, end=end, prompt_tokens=output.num_prompt_tokens, completion_tokens=completion_tokens
        )
        self._scheduler.costs.note(output, max(end - start - drafting_seconds, 0.0), drafting_seconds)


def _uses(sequence: Sequence, adapters: Container[int]) -> bool:
    adapter = sequence.request.adapter
    return adapter is not None and adapter.number in adapters
