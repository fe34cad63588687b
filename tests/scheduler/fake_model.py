"""Run a model without tensors: its next token depends on every KV cell that a real one would read."""

from __future__ import annotations

from collections.abc import Callable, Collection

from attrs import define, evolve, field

from fake_store import FakeStore
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager, KvTable
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.kv.states import StatefulKvManager
from paged_sdk.scheduler.output import NewTokens, SchedulerOutput
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from sequences import SAMPLING, make_sequence
from shadow_kv import ShadowKv, check_paged, history_marks
from shadow_states import ShadowStates, check_states

VOCAB = 5
STOP = 0
MOST_DRAFTS = 3  # of a text per step, of a model with recurrent layers


def next_token(mark: int, choice_index: int) -> int:
    """Return the next token, a function of the whole history and of the choice's own random numbers."""
    return hash((mark, choice_index)) % VOCAB


def keys_of(sequence: Sequence, *, is_long: bool) -> tuple[CacheKey, ...]:
    """Return what a text's KV depends on beside its tokens; that of a long text depends on its being long."""
    return (*sequence.request.cache_keys, *((CacheKey(b"long"),) if is_long else ()))


def reference(sequence: Sequence, config: EngineConfig) -> list[int]:
    """Return the output of a sequence that has all the memory that it needs for itself."""
    max_model_len, switch = config.max_model_len, config.rope_switch
    token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
    output: list[int] = []
    while len(output) < sequence.request.max_tokens and len(token_ids) + len(output) < max_model_len:
        is_long = switch is not None and len(token_ids) + len(output) > switch
        mark = history_marks(token_ids + output, keys_of(sequence, is_long=is_long))[-1]
        output.append(next_token(mark, sequence.choice_index))
        if output[-1] in sequence.request.stop_token_ids:
            break
    return output


@define(eq=False)
class Harness:
    """Runs a scheduler, its memory and the fake model, and checks them at every step.

    :ivar has_states: whether the model has recurrent layers
    """

    config: EngineConfig
    has_states: bool = False
    store: FakeStore | None = None
    manager: KvManager = field(init=False)
    states: ShadowStates = field(factory=lambda: ShadowStates(MOST_DRAFTS))
    scheduler: Scheduler = field(init=False)
    shadow: ShadowKv = field(init=False)
    num_steps: int = 0
    num_prompt_tokens_computed: int = 0
    next_id: int = 0
    sequences: dict[int, Sequence] = field(factory=dict)
    admitted: list[int] = field(factory=list)
    ended: list[int] = field(factory=list)
    flight: tuple[SchedulerOutput, list[list[int]]] | None = None
    forgotten: list[int] = field(factory=list)
    token_seconds: float = 1e-3
    num_drafts_accepted: int = 0

    def __attrs_post_init__(self) -> None:
        config = self.config
        self.manager = (
            KvCacheManager(
                config.num_blocks,
                config.block_size,
                prefix_caching=config.prefix_cache_n > 0,
                sliding_window=config.sliding_window,
                records_published=self.store is not None,
            )
            if config.paged
            else SequenceKvManager(
                max_sequence_tokens=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                num_kept=config.prefix_cache_n,
            )
        )
        if self.has_states:
            self.manager = StatefulKvManager(
                self.manager,
                num_running=config.max_num_seqs,
                num_kept=config.num_kept_states,
                num_drafts=MOST_DRAFTS,
            )
        self.scheduler = Scheduler(config, self.manager, store=self.store)
        self.shadow = ShadowKv(config.block_size if config.paged else None)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        stops: bool = False,
        num_choices: int = 1,
        priority: int = 0,
        cache_keys: tuple[CacheKey, ...] = (),
        skip_prefix_cache: bool = False,
        is_pinned: bool = False,
    ) -> Sequence:
        sequence = make_sequence(
            self.next_id,
            prompt,
            evolve(SAMPLING, prompt_logprobs=0 if skip_prefix_cache else None),
            max_tokens=max_tokens,
            stop_token_ids=frozenset([STOP] if stops else []),
            num_choices=num_choices,
            priority=priority,
            cache_keys=cache_keys,
            is_pinned=is_pinned,
        )
        self.scheduler.add(sequence)
        self.sequences[sequence.seq_id] = sequence
        self.next_id += num_choices
        return sequence

    def schedule(self) -> SchedulerOutput:
        """Choose a step and check that it may be executed."""
        had_work = self.has_work
        before = {s.seq_id: (s.num_computed_tokens + s.num_in_flight, s.num_awaited) for s in self.sequences.values()}
        output = self.scheduler.schedule()
        if self.store is not None and self.store.to_read and not output.scheduled:
            assert self.scheduler.is_stalled or output.dropped or self.flight or self.store.has_ready
            self.store.answer()
            had_work = False
        assert output.scheduled or output.dropped or self.flight or not had_work, "no progress"
        assert sum(row.num_new_tokens for row in output.scheduled) <= self.config.max_num_batched_tokens
        rows = [row.sequence.seq_id for row in output.scheduled]
        assert len(set(rows)) == len(rows)
        withheld = [] if self.flight is None else self.flight[0].withheld
        assert not any(row.is_current and row.sequence.seq_id in rows for row in withheld)
        running = [s for s in self.sequences.values() if s.status is SequenceStatus.RUNNING]
        assert sum(s.num_choices for s in running) <= self.config.max_num_seqs
        assert len(running) == self.scheduler.num_running
        decodes = [row for row in output.scheduled if row.start >= row.sequence.num_prompt_tokens]
        assert all(row in decodes for row in output.scheduled[: output.num_decodes])
        for row in output.scheduled:
            sequence = row.sequence
            assert sequence.status is SequenceStatus.RUNNING
            assert row.num_new_tokens > 0
            start, num_awaited = before[sequence.seq_id]
            if self.admitted.count(sequence.seq_id) > sequence.epoch:
                assert row.start == start
            else:
                self.admitted.append(sequence.seq_id)
                num_awaited = 0
            is_last = row.known_end == len(sequence.token_ids) + num_awaited
            assert not row.draft_token_ids or is_last
            assert row.num_samples == (sequence.num_choices if is_last and sequence.request.generates else 0)
        for sequence in output.dropped:
            assert sequence.finish_reason == "length"
            assert sequence.num_computed_tokens == self.manager.max_sequence_tokens
            self.ended.append(sequence.seq_id)
        self.forgotten += output.finished_seq_ids
        self.check_memory()
        return output

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        """Copy, write all rows, then read all that they attend to and sample."""
        self.num_steps += 1
        self.shadow.copy(output.copies)
        self.shadow.release(output.released)
        self.states.copy(output.state_copies)
        if self.store is not None:
            self.store.restore(output.restores, self.shadow)
        overlap = self._overlap()
        histories = []
        for row in output.scheduled:
            token_ids = row.sequence.token_ids
            if row.known_end > len(token_ids):
                token_ids = [*token_ids, overlap[row.sequence.seq_id]]
            if row.draft_token_ids:
                token_ids = [*token_ids, *row.draft_token_ids]
            histories.append(history_marks(token_ids, keys_of(row.sequence, is_long=row.sequence.is_long)))
        if self.has_states:
            rows = output.message().rows
            assert len({row.state_slot for row in rows}) == len(rows)
            for step_row, marks in zip(rows, histories, strict=True):
                self.states.advance(step_row.state_slot, marks, step_row.start, step_row.end, step_row.num_drafts)
        for row, marks in zip(output.scheduled, histories, strict=True):
            prompt_end = row.sequence.num_prompt_tokens
            for position in range(row.start, row.end):
                self.shadow.write(row.kv_ids, position, marks[position])
                self.num_prompt_tokens_computed += position < prompt_end
        sampled = []
        for row, marks in zip(output.scheduled, histories, strict=True):
            window = self.config.sliding_window
            first = 0 if window is None else max(0, row.start - window + 1)
            for position in range(first, row.end):
                assert self.shadow.read(row.kv_ids, position) == marks[position]
            choices = range(row.sequence.choice_index, row.sequence.choice_index + row.num_samples)
            sampled.append([next_token(marks[row.known_end - 1], choice) for choice in choices])
            for position, draft in enumerate(row.draft_token_ids, start=row.known_end):
                if sampled[-1][-1] != draft:
                    break
                sampled[-1].append(next_token(marks[position], row.sequence.choice_index))
        return sampled

    def update(self, output: SchedulerOutput, sampled: list[list[int]]) -> NewTokens:
        """Take in a step and check what it is said to have done."""
        new_tokens = self.scheduler.update(output, sampled)
        if self.store is not None:
            self.store.store(self.manager.take_published(), self.shadow)
        self.scheduler.costs.note(
            output, 2e-3 + self.token_seconds * sum(row.num_new_tokens for row in output.scheduled)
        )
        assert new_tokens.num_tokens == sum(map(len, new_tokens.token_ids))
        for index, (sequence, token_ids, row) in enumerate(
            zip(new_tokens.sequences, new_tokens.token_ids, new_tokens.rows, strict=True)
        ):
            sample = new_tokens.samples.get(index, 0)
            self.sequences.setdefault(sequence.seq_id, sequence)
            if sample:
                self.admitted.append(sequence.seq_id)  # forked, and running at once
            assert sampled[row][sample : sample + len(token_ids)] == token_ids
            assert sequence.token_ids[-len(token_ids) :] == token_ids
            self.num_drafts_accepted += len(token_ids) - 1
            if sequence.finish_reason is not None:
                self.ended.append(sequence.seq_id)
            else:
                assert sequence.num_computed_tokens == len(sequence.token_ids) - 1
        self.check_memory()
        return new_tokens

    def draft(self, guess: Callable[[list[int]], list[int]]) -> None:
        """Give every text that only generates some drafts.

        :param guess: turns the tokens that would really follow into drafts
        """
        for sequence in self.scheduler.decoding:
            follows = reference(sequence, self.config)[sequence.num_output_tokens :]
            sequence.draft_token_ids = guess(follows)

    def step(self, *, ahead: bool = False, host: Collection[int] | None = None) -> SchedulerOutput:
        """Run one step, chosen before the results of the previous one are taken in; afterwards one may be under way.

        :param ahead: whether to leave it under way, unless sequences are to be forked
        :param host: sequences whose tokens are withheld until its results are taken in, beside those that are to be
            forked; None: no token is
        """
        output = self.schedule()
        sampled = self.execute(output) if output.scheduled else []
        if self.store is not None and not output.scheduled and not self.scheduler.num_running:
            self.store.restore(output.restores, self.shadow)
        if ahead and host is not None:
            self._withhold(output, host)
        self.land()
        if output.scheduled:
            self.flight = output, sampled
            if not ahead or (host is None and any(row.num_samples > 1 for row in output.scheduled)):
                self.land()
        return output

    def _withhold(self, output: SchedulerOutput, host: Collection[int]) -> None:
        rows = [
            index
            for index, row in enumerate(output.scheduled)
            if row.num_samples > 1 or (row.num_samples and row.sequence.seq_id in host)
        ]
        self.scheduler.withhold(output, rows)

    def land(self) -> None:
        """Take in the step that is under way."""
        if self.flight is not None:
            flight, self.flight = self.flight, None
            self.update(*flight)

    def _overlap(self) -> dict[int, int]:
        """Return the tokens that the step under way has sampled, by sequence."""
        if self.flight is None:
            return {}
        output, sampled = self.flight
        return {
            row.sequence.seq_id: tokens[-1]
            for row, tokens in zip(output.scheduled, sampled, strict=True)
            if tokens and row not in output.withheld
        }

    def run(self, max_steps: int = 20_000, *, ahead: bool = False, host: Collection[int] | None = None) -> None:
        """Run steps until all sequences have ended."""
        for _ in range(max_steps):
            if not self.has_work and self.flight is None:
                return
            self.step(ahead=ahead, host=host)
        raise AssertionError(f"still at work after {max_steps} steps")

    def check_memory(self) -> None:
        held: list[KvTable] = []
        for sequence in self.sequences.values():
            if sequence.status is SequenceStatus.RUNNING:
                held.append(sequence.table)
            elif sequence.status is SequenceStatus.PINNED:
                held.append(sequence.table)
                self._check_pinned(sequence)
            else:
                assert sequence.table.ids == []
        # Choices that were forked in this very update are not known here yet.
        held += [s.table for s in self.scheduler._running if s.seq_id not in self.sequences]
        own = self.manager
        if isinstance(own, StatefulKvManager):
            check_states(own, held, num_running=self.config.max_num_seqs, num_kept=self.config.num_kept_states)
            own = own._kv
        if isinstance(own, KvCacheManager):
            check_paged(own, held)
        pinned = [s for s in self.sequences.values() if s.status is SequenceStatus.PINNED]
        assert len(pinned) == len(self.scheduler.pins)
        assert self.scheduler.pins.num_blocks == len({block for s in pinned for block in s.table.ids})
        assert self.scheduler.pins.num_blocks <= self.scheduler.pins.limit

    def _check_pinned(self, sequence: Sequence) -> None:
        """Check that all full blocks of a pinned prompt are there, and that a text that begins with it finds them."""
        prompt, size = sequence.token_ids, self.config.block_size
        num_full = len(prompt) - len(prompt) % size
        marks = history_marks(prompt, keys_of(sequence, is_long=sequence.is_long))[:num_full]
        assert [self.shadow.read(sequence.table.ids, place) for place in range(num_full)] == marks
        prefix = self.manager.match(KvTable(sequence.table.cache_keys), [*prompt, VOCAB])
        assert list(prefix.ids[: num_full // size]) == sequence.table.ids

    def release_pins(self) -> None:
        """End all pinned sequences."""
        for sequence in list(self.scheduler.pins):
            self.scheduler.finish(sequence, "canceled")

    def check_end(self) -> None:
        """Check that nothing is held, and that every text is what it would have been alone."""
        usage = self.manager.usage
        assert usage.used == 0
        assert usage.free + usage.cached == usage.total
        for sequence in self.sequences.values():
            if sequence.request.is_pinned:
                assert sequence.finish_reason == "canceled"
                continue
            expected = reference(sequence, self.config)
            output = sequence.output_token_ids
            assert sequence.status is SequenceStatus.FINISHED
            if sequence.finish_reason == "canceled" or len(sequence.token_ids) > self.manager.max_sequence_tokens:
                assert output == expected[: len(output)]
            else:
                assert output == expected
                assert sequence.finish_reason == ("stop" if output[-1] in sequence.request.stop_token_ids else "length")
