"""Hypothesis drives a scheduler: requests come and go at any time, memory is short, and every text must be right."""

from __future__ import annotations

from collections.abc import Collection

from fake_model import VOCAB, Harness
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fake_store import FakeStore
from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import InvalidRequestError, PinLimitError
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.scheduler.sequence import SequenceStatus

IMAGES = (CacheKey(b"image", 5), CacheKey(b"other", 9))
cache_keys = st.sampled_from([(), (), (CacheKey(b"salt"),), (CacheKey(b"image", 4),), IMAGES])
# Whose tokens are withheld while a step is under way: nobody's, not even where texts part; those of some; everybody's.
hosts = st.sampled_from([None, range(0, 1000, 2), range(0, 1000, 3), range(1000)])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class PagedMachine(RuleBasedStateMachine):
    paged = True
    window: int | None = None
    switch: int | None = None
    fewer_blocks = 0
    longest_prompt = 17
    max_model_len = 28
    has_states = False
    keeps_sequences = True
    stores = False

    @initialize(
        num_blocks=st.integers(6, 12),
        seats=st.integers(3, 6),
        budget=st.sampled_from([1, 2, 5, 8, 64]),
        cache=st.sampled_from([0, 2, 2, 2]),
        slowdown=st.sampled_from([0.0, 1.1, 3.0]),
    )
    def start(self, num_blocks: int, seats: int, budget: int, cache: int, slowdown: float) -> None:
        self.harness = Harness(
            EngineConfig(
                paged=self.paged,
                num_blocks=num_blocks - self.fewer_blocks,
                block_size=3,
                prefix_cache_n=cache if self.keeps_sequences else 0,
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                max_slowdown=slowdown,
                max_model_len=self.max_model_len,
                sliding_window=self.window,
                rope_switch=self.switch,
            ),
            has_states=self.has_states,
            store=FakeStore(block_size=3) if self.stores else None,
        )

    @rule(seconds=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]))
    def change_speed(self, seconds: float) -> None:
        self.harness.token_seconds = seconds

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        stops=st.booleans(),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cache_keys=cache_keys,
        skip=st.sampled_from([False, False, False, True]),
        repeats=st.sampled_from([1, 1, 1, 3]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stops: bool,
        num_choices: int,
        priority: int,
        cache_keys: tuple[CacheKey, ...],
        skip: bool,
        repeats: int,
    ) -> None:
        self.harness.add(
            (prompt * repeats)[: self.longest_prompt],
            max_tokens=max_tokens,
            stops=stops,
            num_choices=num_choices,
            priority=priority,
            cache_keys=cache_keys,
            skip_prefix_cache=skip,
        )

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data())
    def add_next_turn(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.harness.sequences.values())))
        prompt = sequence.token_ids + data.draw(st.lists(st.integers(0, 1), max_size=3))
        self.harness.add(prompt[: self.longest_prompt], max_tokens=4)

    @rule(prompt=prompts, repeats=st.sampled_from([1, 1, 3]), cache_keys=cache_keys)
    def pin(self, prompt: list[int], repeats: int, cache_keys: tuple[CacheKey, ...]) -> None:
        prompt = (prompt * repeats)[: self.longest_prompt]
        pins = self.harness.scheduler.pins
        try:
            self.harness.add(prompt, cache_keys=cache_keys, is_pinned=True)
        except PinLimitError as error:
            assert error.limit == pins.limit
            assert error.num_pinned + error.num_blocks > error.limit
            assert error.num_blocks <= len(prompt) // 3
        except InvalidRequestError:
            assert not pins.limit

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """End a sequence whose KV nobody may use; pinned ones that share it are computed again."""
        self.harness.land()
        sequence = data.draw(st.sampled_from(list(self.harness.sequences.values())))
        if sequence.status is SequenceStatus.RUNNING:
            self.harness.scheduler.forget(sequence)
            self.harness.scheduler.finish(sequence, "canceled")
            self.harness.check_memory()

    @rule()
    def change_weights(self) -> None:
        """Have what is pinned computed again, once nothing else is at work."""
        self.harness.run()
        self.harness.scheduler.recompute_pins()
        self.harness.check_memory()

    @rule(num_steps=st.integers(1, 6), ahead=st.booleans(), host=hosts)
    def steps(self, num_steps: int, host: Collection[int] | None, *, ahead: bool) -> None:
        """Results are taken in before the next step is chosen, or after; a step may be under way when this ends."""
        for _ in range(num_steps):
            self.harness.step(ahead=ahead, host=host)

    @rule(num_right=st.integers(0, 4), num_wrong=st.integers(0, 3), ahead=st.booleans(), host=hosts)
    def step_with_drafts(self, num_right: int, num_wrong: int, host: Collection[int] | None, *, ahead: bool) -> None:
        """Run steps whose drafts are partly right; stop tokens and the end of the text may lie among them."""
        self.harness.draft(lambda follows: follows[:num_right] + [VOCAB] * num_wrong)
        self.harness.step(ahead=ahead, host=host)

    @rule(data=st.data())
    def step_with_cancels_in_flight(self, data: st.DataObject) -> None:
        self.harness.land()
        output = self.harness.schedule()
        sampled = self.harness.execute(output)
        for row in output.scheduled:
            if data.draw(st.integers(0, 3)) == 0:
                self.harness.scheduler.finish(row.sequence, "canceled")
        self.harness.update(output, sampled)

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.harness.sequences.values())))
        had_ended = sequence.status is SequenceStatus.FINISHED
        reason = sequence.finish_reason
        self.harness.scheduler.finish(sequence, "canceled")
        assert sequence.finish_reason == (reason if had_ended else "canceled")
        self.harness.check_memory()

    @rule()
    def reset(self) -> None:
        self.harness.scheduler.pins.reset_prefix_cache()
        self.harness.check_memory()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run(ahead=True, host=range(0, 1000, 2))
            self.harness.release_pins()
            self.harness.check_end()


class WindowMachine(PagedMachine):
    """Texts longer than the pool, which holds a window and little more."""

    window = 5
    fewer_blocks = 3
    longest_prompt = 45
    max_model_len = 60


class StoreMachine(PagedMachine):
    """Blocks that have left the pool come back from a store, which answers late."""

    stores = True

    @rule(num_reads=st.integers(1, 3))
    def read(self, num_reads: int) -> None:
        assert self.harness.store is not None
        for _ in range(num_reads):
            self.harness.store.answer()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A stored block disappears, as another process may remove it."""
        assert self.harness.store is not None
        if self.harness.store.content:
            del self.harness.store.content[data.draw(st.sampled_from(sorted(self.harness.store.content)))]


class StoreWindowMachine(StoreMachine, WindowMachine):
    """Texts longer than the pool, whose first blocks are read to be skipped."""


class ContiguousMachine(PagedMachine):
    paged = False


class SwitchMachine(PagedMachine):
    """Texts whose KV is computed anew when they outgrow a length; many do."""

    switch = 8


class ContiguousSwitchMachine(SwitchMachine):
    paged = False


class StatefulMachine(PagedMachine):
    """Texts of a model whose recurrent layers keep a state for each, with room for a few drafts."""

    has_states = True


class WindowStatefulMachine(StatefulMachine):
    """Attends within windows in its other layers."""

    window = WindowMachine.window
    fewer_blocks = WindowMachine.fewer_blocks
    longest_prompt = WindowMachine.longest_prompt
    max_model_len = WindowMachine.max_model_len


class SwitchStatefulMachine(StatefulMachine):
    switch = SwitchMachine.switch


class ContiguousStatefulMachine(StatefulMachine):
    paged = False
    keeps_sequences = False


_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
for _machine in (
    PagedMachine,
    WindowMachine,
    ContiguousMachine,
    SwitchMachine,
    ContiguousSwitchMachine,
    StoreMachine,
    StoreWindowMachine,
):
    _machine.TestCase.settings = _SETTINGS
for _machine in (StatefulMachine, WindowStatefulMachine, SwitchStatefulMachine, ContiguousStatefulMachine):
    _machine.TestCase.settings = settings(_SETTINGS, max_examples=30)

TestPaged = PagedMachine.TestCase
TestWindow = WindowMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestSwitch = SwitchMachine.TestCase
TestStore = StoreMachine.TestCase
TestStoreWindow = StoreWindowMachine.TestCase
TestContiguousSwitch = ContiguousSwitchMachine.TestCase
TestStateful = StatefulMachine.TestCase
TestWindowStateful = WindowStatefulMachine.TestCase
TestSwitchStateful = SwitchStatefulMachine.TestCase
TestContiguousStateful = ContiguousStatefulMachine.TestCase
