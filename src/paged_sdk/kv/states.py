"""Manage the slots of sequences' states in recurrent layers, beside the KV memory of the other layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from paged_sdk.kv.manager import KvCopy, KvManager, KvTable, KvUsage, Prefix, StateCopy, StoredBlock
from paged_sdk.kv.paged import KvCacheManager

__all__ = ["StatefulKvManager"]


class StatefulKvManager:
    """Gives each running sequence a slot of state (a :class:`~paged_sdk.kv.manager.KvManager`), and keeps copies of
    states in further slots, so that cached KV can be used.

    A sequence has a slot exactly while its table is in use: from ``attach`` until ``free``, at which its state is lost.
    KV of a prefix is of use only with the state at its end, and a state is passed once. So it is copied when a step
    begins at the end of a block: where a prompt's chunk has ended, for which chunks are cut to whole blocks; where
    texts that begin alike part; and where a block of output has become full, of which each sequence keeps only the
    last. After a step with drafts, the state is that before them, with all that is needed to take it through those that
    were right: a copy serves for the end of a block among these, too.

    The device executes steps in order, copies before rows, so slots may be given away at once, and a copy reads the
    state that earlier steps leave even if they are in flight.

    :param kv: manages the KV of the layers with attention; contiguous KV must keep no prefixes
    :param num_running: slots of running sequences
    :param num_kept: slots of copies, least recently used evicted first; 0: the KV manager keeps no prefixes
    :param num_drafts: most drafts of a sequence per step, for which slots have room
    """

    def __init__(self, kv: KvManager, *, num_running: int, num_kept: int, num_drafts: int = 0) -> None:
        self._kv = kv
        self._num_drafts = num_drafts
        self._blocks = kv if isinstance(kv, KvCacheManager) and num_kept else None
        self._free = list(reversed(range(num_running)))
        self._free_kept = list(reversed(range(num_running, num_running + num_kept)))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # by the hash of the last block before the state
        self._copies: dict[int, StateCopy] = {}  # by target

    @property
    def max_sequence_tokens(self) -> int:
        return self._kv.max_sequence_tokens

    @property
    def prefix_queries(self) -> int:
        return self._kv.prefix_queries

    @property
    def prefix_hits(self) -> int:
        return self._kv.prefix_hits

    @property
    def prefix_restored(self) -> int:
        return self._kv.prefix_restored

    @property
    def usage(self) -> KvUsage:
        return self._kv.usage

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        """Find the longest cached start at whose end a state is kept. Nothing is awaited: where a running sequence
        leaves states depends on its chunks.
        """
        prefix = self._kv.match(table, token_ids)
        if self._blocks is None:
            assert not prefix.num_tokens, "no state is kept at its end"
            return prefix
        table.num_known_blocks = num_blocks = len(prefix.ids)
        while num_blocks and table.hashes[num_blocks - 1] not in self._kept:
            num_blocks -= 1
        return Prefix(num_blocks * self._blocks.block_size, prefix.ids[:num_blocks])

    def hashes_after(self, table: KvTable, token_ids: list[int], prefix: Prefix) -> Sequence[bytes]:
        """Return nothing: a store has no states, without which its KV is of no use."""
        return ()

    def restore(self, digests: Sequence[bytes], stored: Collection[bytes]) -> None:
        self._kv.restore(digests, stored)

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        return bool(self._free) and self._kv.fits(prefix, num_tokens, num_growing=num_growing)

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Give the sequence a slot, too, with a copy of the state at the end of ``prefix``. Without a prefix the slot
        holds another sequence's state, which the first row does not read.
        """
        self._kv.attach(table, prefix, token_ids)
        table.state_slot = self._free.pop()
        table.num_first_blocks = len(table.hashes)
        if prefix.ids:
            digest = table.hashes[len(prefix.ids) - 1]
            self._kept.move_to_end(digest)
            self._copy(self._kept[digest], table.state_slot)

    def grow(self, table: KvTable, start: int, num_tokens: int, *, num_drafts: int = 0) -> int:
        """Keep a copy of the state if it serves for the end of a block, and cut prompts to whole blocks. Drafts beyond
        those for which slots have room are not granted.
        """
        num_known = num_tokens - num_drafts
        num_tokens = num_known + min(num_drafts, self._num_drafts)
        if self._blocks is None or not self._blocks.shares(table):
            return self._kv.grow(table, start, num_tokens)
        self._keep_before(table, start, table.state_end or start)
        end = start + num_tokens
        granted = self._kv.grow(table, start, (end if num_drafts else self._cut(table, start, end)) - start)
        table.state_end = start + num_known if granted > num_known else 0
        if num_tokens > 1:
            # So that the next row comes by here: a chunk's, or the one that takes the state through drafts.
            table.capacity = min(table.capacity, start + min(granted, num_known))
        return granted

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        self._kv.commit(table, token_ids, num_computed)

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Give the second table a slot, too, with a copy of the state, which must be that after ``num_computed``
        tokens.
        """
        child = self._kv.fork(table, num_computed)
        child.state_slot = self._free.pop()
        self._copy(table.state_slot, child.state_slot)
        return child

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Take the slot back, too. If the last row had drafts, no later one has kept what serves for the end of a block
        among them. With that row in flight, the state will have gone through more than ``num_computed`` tokens.
        """
        if self._blocks is not None and self._blocks.shares(table) and table.state_end:
            self._keep_before(table, num_computed, table.state_end)
        self._kv.free(table, token_ids, num_computed)
        self._copies.pop(table.state_slot, None)
        self._free.append(table.state_slot)
        table.state_slot, table.state_end, table.output_state = 0, 0, None

    @property
    def can_pin(self) -> bool:
        """Return False: see :meth:`pin`."""
        return False

    def pin(self, table: KvTable, num_computed: int) -> bool:
        """Return False: blocks alone start no text, and kept states are few, so they are not held."""
        return False

    def forget(self, table: KvTable) -> None:
        """Forget the states of the table's tokens, too."""
        self._kv.forget(table)
        for digest in table.hashes:
            self._drop(digest)

    def take_copies(self) -> list[KvCopy]:
        return self._kv.take_copies()

    def take_state_copies(self) -> list[StateCopy]:
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def take_restores(self) -> list[StoredBlock]:
        return self._kv.take_restores()

    def take_published(self) -> list[StoredBlock]:
        return self._kv.take_published()

    def take_released(self) -> list[int]:
        return self._kv.take_released()

    def reset_prefix_cache(self, pinned: Iterable[KvTable] = ()) -> None:
        """Forget every kept state, too."""
        self._kv.reset_prefix_cache(pinned)
        for digest in list(self._kept):
            self._drop(digest)

    def _cut(self, table: KvTable, start: int, end: int) -> int:
        """Return where a chunk ends: at the end of a block at which a state is to be kept, if there is one within.

        That is where another text has gone on otherwise, since further ones may begin alike, or the last one.
        """
        assert self._blocks is not None
        size = self._blocks.block_size
        parting = table.num_known_blocks * size
        if start < parting < end:
            return parting
        cut = end // size * size
        if cut == end == table.num_first_blocks * size:
            cut -= size  # a text of whole blocks: who has the same computes its last token
        return cut if start < cut else end

    def _keep_before(self, table: KvTable, end: int, state_end: int) -> None:
        """Keep a copy of a table's state if a block ends among the tokens that it leads to.

        :param end: how many tokens are computed
        :param state_end: how many of these the state has gone through; the others were right drafts
        """
        assert self._blocks is not None
        num_blocks = end // self._blocks.block_size
        if num_blocks and num_blocks * self._blocks.block_size >= state_end and len(table.hashes) >= num_blocks:
            self._keep(table, table.hashes[num_blocks - 1], is_output=num_blocks > table.num_first_blocks)

    def _keep(self, table: KvTable, digest: bytes, *, is_output: bool) -> None:
        """Keep a copy of a table's state, unless there is one of the same tokens.

        :param digest: the hash of the last block before the state
        :param is_output: whether the copy replaces an earlier one of the sequence's output
        """
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        if is_output and table.output_state is not None:
            self._drop(table.output_state)
        if not self._free_kept:
            self._drop(next(iter(self._kept)))
        self._kept[digest] = slot = self._free_kept.pop()
        self._copy(table.state_slot, slot)
        if is_output:
            table.output_state = digest

    def _drop(self, digest: bytes) -> None:
        slot = self._kept.pop(digest, None)
        if slot is not None:
            self._copies.pop(slot, None)
            self._free_kept.append(slot)

    def _copy(self, src: int, dst: int) -> None:
        # All copies read before any writes: one that would read what another writes reads what that one reads.
        pending = self._copies.get(src)
        self._copies[dst] = StateCopy(src if pending is None else pending.src, dst)
