"""Hypothesis drives the KV managers through everything that can happen, and checks everything after each operation."""

from __future__ import annotations

from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvTable
from paged_sdk.kv.paged import KvCacheManager
from shadow_kv import ShadowKv, check_paged, history_marks

BLOCK_SIZE = 3
NUM_BLOCKS = 9
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
keys = st.sampled_from([(), (), (CacheKey(b"adapter"),), (CacheKey(b"image", 4),)])


@define(eq=False)
class Live:
    """Describes a sequence as its owner sees it."""

    token_ids: list[int]
    cache_keys: tuple[CacheKey, ...]
    table: KvTable
    num_computed: int = 0
    marks: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.marks = history_marks(self.token_ids, self.cache_keys)

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.marks = history_marks(self.token_ids, self.cache_keys)

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        del self.marks[num_tokens:]


class PagedMachine(RuleBasedStateMachine):
    """Starts, grows, forks, rejects tokens of, ends and brings back sequences, on a pool that is too small for them."""

    manager: KvCacheManager | SequenceKvManager
    window: int | None = None
    prefix_caching = True
    paged = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.make_manager()
        self.shadow = ShadowKv(BLOCK_SIZE if self.paged else None)
        self.live: list[Live] = []
        self.parked: list[Live] = []
        self.pinned: list[Live] = []
        self.histories: list[list[int]] = []
        self.content: dict[bytes, list[int]] = {}

    def make_manager(self) -> KvCacheManager | SequenceKvManager:
        return KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=self.prefix_caching, sliding_window=self.window)

    @rule(
        token_ids=tokens,
        cache_keys=keys,
        most_shared=st.sampled_from([None, None, 0, 1, 4, 9]),
        keeps_all=st.booleans(),
    )
    def admit(
        self, token_ids: list[int], cache_keys: tuple[CacheKey, ...], most_shared: int | None, keeps_all: bool
    ) -> None:
        table = KvTable(cache_keys, most_shared=most_shared, keeps_all=keeps_all)
        if most_shared is not None:
            assert self.manager.match(table, token_ids).num_tokens <= most_shared
        self._attach(Live(token_ids, cache_keys, table))

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), tail=tokens, cache_keys=keys)
    def admit_next_turn(self, data: st.DataObject, tail: list[int], cache_keys: tuple[CacheKey, ...]) -> None:
        history = data.draw(st.sampled_from(self.histories))
        cut = data.draw(st.integers(0, len(history)))
        self._attach(Live(history[:cut] + tail, cache_keys, KvTable(cache_keys)))

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.parked))
        self.parked.remove(sequence)
        self._attach(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Run one step over some sequences: drafts may be rejected, rows lost on the way, others preempted
        meanwhile.
        """
        rows: list[tuple[Live, int, int]] = []
        for sequence in data.draw(st.lists(st.sampled_from(self.live), unique_by=id, min_size=1)):
            if sequence not in self.live:
                continue
            start = sequence.num_computed
            num_missing = len(sequence.token_ids) - start
            num_drafts = 0
            if num_missing <= 1:
                num_drafts = data.draw(st.integers(1 - num_missing, 4))
                sequence.extend(data.draw(st.lists(st.integers(0, 1), min_size=num_drafts, max_size=num_drafts)))
            wanted = data.draw(st.integers(1, num_missing + num_drafts))
            room = self.manager.grow(sequence.table, start, wanted)
            assert 0 <= room <= wanted
            if num_drafts:
                sequence.truncate(start + max(room, num_missing))
            if room:
                rows.append((sequence, room, max(0, start + room - (start + num_missing))))
            elif self.live:
                self._free(data.draw(st.sampled_from(self.live)))
        self.shadow.copy(self.manager.take_copies())
        self.shadow.release(self.manager.take_released())
        for sequence, room, _ in rows:
            if sequence in self.live:
                self._write(sequence, room)
        for sequence, room, num_drafts in rows:
            if sequence not in self.live:
                continue
            num_rejected = data.draw(st.integers(0, num_drafts))
            if data.draw(st.integers(0, 7)) == 0:
                self._free(sequence)
                continue
            computed = sequence.num_computed + room - num_rejected
            if num_rejected:
                sequence.truncate(computed)
            sequence.num_computed = computed
            self.manager.commit(sequence.table, sequence.token_ids, computed)
            for index, digest in enumerate(sequence.table.hashes[: sequence.table.num_published]):
                self.content[digest] = sequence.marks[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]

    @precondition(lambda self: any(sequence.num_computed for sequence in self.live))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        computed = [sequence for sequence in self.live if sequence.num_computed and not self._awaits_copy(sequence)]
        if computed:
            parent = data.draw(st.sampled_from(computed))
            table = self.manager.fork(parent.table, parent.num_computed)
            self.live.append(Live(list(parent.token_ids), parent.cache_keys, table, parent.num_computed))

    @precondition(lambda self: any(sequence.table.keeps_all for sequence in self.live))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Hold the full blocks of a sequence that computes nothing more, or end it if they cannot all be found."""
        sequence = data.draw(st.sampled_from([each for each in self.live if each.table.keeps_all]))
        num_full = sequence.num_computed - sequence.num_computed % BLOCK_SIZE
        if not self.manager.pin(sequence.table, sequence.num_computed):
            self._free(sequence)
            return
        sequence.truncate(num_full)
        sequence.num_computed = num_full
        self.live.remove(sequence)
        self.pinned.append(sequence)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(sequence)
        self.manager.free(sequence.table, sequence.token_ids, sequence.num_computed)
        self.histories.append(list(sequence.token_ids))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), park=st.booleans())
    def free(self, data: st.DataObject, park: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self._free(sequence)
        if park:
            self.parked.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """End a sequence whose KV nobody may use."""
        sequence = data.draw(st.sampled_from(self.live))
        ids = list(sequence.table.ids)
        self.manager.forget(sequence.table)
        self._free(sequence)
        for pin in list(self.pinned):
            if not self.manager.pin(pin.table, pin.num_computed):
                self.pinned.remove(pin)
                self.manager.free(pin.table, pin.token_ids, pin.num_computed)
        prefix = self.manager.match(KvTable(sequence.cache_keys), sequence.token_ids)
        if self.paged:
            assert prefix.num_tokens == 0
        else:
            assert not {*ids, sequence.table.source} & set(prefix.ids)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache([sequence.table for sequence in self.pinned])
        if not self.pinned:
            assert self.manager.match(KvTable(), [0, 1] * 10).num_tokens == 0

    @invariant()
    def memory_holds_what_was_computed(self) -> None:
        for sequence in self.live:
            if not self._awaits_copy(sequence):
                self._check_content(sequence, sequence.num_computed)

    @invariant()
    def what_is_pinned_is_whole_and_found(self) -> None:
        for sequence in self.pinned:
            table, marks = sequence.table, sequence.marks
            assert [self.shadow.read(table.ids, place) for place in range(len(marks))] == marks
            prefix = self.manager.match(KvTable(sequence.cache_keys), [*sequence.token_ids, 2])
            assert prefix.ids == tuple(table.ids)
            assert prefix.num_tokens == len(marks)

    @invariant()
    def books_balance(self) -> None:
        assert isinstance(self.manager, KvCacheManager)
        check_paged(self.manager, [sequence.table for sequence in self.live + self.pinned])
        for digest, block in self.manager._pool._by_hash.items():
            assert [self.shadow.cells[block.id, offset] for offset in range(BLOCK_SIZE)] == self.content[digest]

    def teardown(self) -> None:
        for sequence in list(self.live):
            self._free(sequence)
        assert self.pinned or self.manager.usage.used == 0
        for sequence in self.pinned:
            self.manager.free(sequence.table, sequence.token_ids, sequence.num_computed)
        self.pinned.clear()
        assert self.manager.usage.used == 0
        assert not self.manager.take_copies()
        self.books_balance()

    def _attach(self, sequence: Live) -> None:
        length = len(sequence.token_ids)
        before = self.manager.usage
        prefix = self.manager.match(sequence.table, sequence.token_ids)
        assert self.manager.usage == before
        assert 0 <= prefix.num_tokens < length
        if length > self.manager.max_sequence_tokens or not self.manager.fits(prefix, length, num_growing=0):
            return
        self.manager.attach(sequence.table, prefix, sequence.token_ids)
        sequence.num_computed = prefix.num_tokens
        if not self.paged:
            self.shadow.copy(self.manager.take_copies())
            self.shadow.release(self.manager.take_released())
        self._check_content(sequence, prefix.num_tokens)
        self.live.append(sequence)
        if self.window is None or sequence.table.keeps_all:
            # Capacity that was promised is there; this sequence may be given all of it at once.
            free = self.manager.usage.cached + self.manager.usage.free
            assert not self.paged or free * BLOCK_SIZE >= length - prefix.num_tokens

    def _write(self, sequence: Live, num_tokens: int) -> None:
        table = sequence.table
        for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
            if isinstance(self.manager, KvCacheManager):
                block = self.manager._pool.blocks[table.ids[position // BLOCK_SIZE]]
                assert position // BLOCK_SIZE >= table.num_out_of_window
                assert block.ref_count == 1
                assert block.hash is None
            self.shadow.write(table.ids, position, sequence.marks[position])
        self._check_content(sequence, sequence.num_computed + num_tokens, start=sequence.num_computed)

    def _check_content(self, sequence: Live, num_tokens: int, start: int | None = None) -> None:
        """Check that whatever a query from ``start`` on attends to was computed for this very history."""
        first = 0
        if self.window is not None and not sequence.table.keeps_all:
            first = max(0, (num_tokens if start is None else start) - self.window + 1)
        for position in range(first, num_tokens):
            assert self.shadow.read(sequence.table.ids, position) == sequence.marks[position]

    def _awaits_copy(self, sequence: Live) -> bool:
        return not self.paged and sequence.table.ids[0] in self.manager._copies

    def _free(self, sequence: Live) -> None:
        self.live.remove(sequence)
        self.manager.free(sequence.table, sequence.token_ids, sequence.num_computed)
        self.histories.append(list(sequence.token_ids))
        sequence.num_computed = 0
        assert sequence.table.ids == []


class PagedWithoutCacheMachine(PagedMachine):
    prefix_caching = False


class NarrowWindowMachine(PagedMachine):
    """Uses a window that the pool holds several times."""

    window = 4


class WideWindowMachine(PagedMachine):
    """Uses a window that the pool cannot hold."""

    window = 40


class ContiguousMachine(PagedMachine):
    """Leads the same life on slots."""

    paged = False
    num_kept = 3

    def make_manager(self) -> SequenceKvManager:
        return SequenceKvManager(max_sequence_tokens=64, max_num_seqs=1000, num_kept=self.num_kept)

    @invariant()
    def books_balance(self) -> None:
        assert isinstance(self.manager, SequenceKvManager)
        usage = self.manager.usage
        assert usage.used == len(self.live)
        assert usage.cached == len(self.manager._kept) <= self.num_kept
        assert usage.used + usage.cached + usage.free == usage.total
        held = [sequence.table.ids[0] for sequence in self.live] + list(self.manager._kept)
        assert len(set(held)) == len(held)
        assert not set(held) & set(self.manager._released)
        for slot, kept in self.manager._kept.items():
            marks = history_marks(kept.token_ids, kept.cache_keys)
            assert [self.shadow.cells[slot, position] for position in range(len(marks))] == marks


class ContiguousWithoutCacheMachine(ContiguousMachine):
    num_kept = 0


_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
for _machine in (
    PagedMachine,
    PagedWithoutCacheMachine,
    NarrowWindowMachine,
    WideWindowMachine,
    ContiguousMachine,
    ContiguousWithoutCacheMachine,
):
    _machine.TestCase.settings = _SETTINGS

TestPaged = PagedMachine.TestCase
TestPagedWithoutCache = PagedWithoutCacheMachine.TestCase
TestNarrowWindow = NarrowWindowMachine.TestCase
TestWideWindow = WideWindowMachine.TestCase
TestContiguous = ContiguousMachine.TestCase
TestContiguousWithoutCache = ContiguousWithoutCacheMachine.TestCase
