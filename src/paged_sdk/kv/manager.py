"""Define the scheduler's view of KV memory: one protocol for paged and contiguous KV."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from attrs import frozen

from paged_sdk.kv.block_hash import CacheKey

__all__ = ["KvCopy", "KvManager", "KvTable", "KvUsage", "Prefix", "StateCopy", "StoredBlock"]


class KvTable:
    """Holds the KV memory of one sequence. It lives as long as the sequence and is empty while the sequence waits.

    Outside ``kv/``, only ``ids``, ``version``, ``capacity``, ``next_commit`` and ``state_slot`` matter; the rest is
    internal to the manager.

    :ivar ids: block table (paged), or the one slot (contiguous)
    :ivar version: changes when an entry of ``ids`` that will be read changes. If it is unchanged, the table has only
        grown at its end, so a reader that knows the earlier table needs only the new entries
    :ivar capacity: tokens of the sequence that may be written without calling ``grow``
    :ivar next_commit: number of computed tokens from which ``commit`` has something to do
    :ivar state_slot: where the sequence's state in recurrent layers is, while the table is in use; 0 if there are none
    :ivar state_end: how many tokens this state has gone through, if the sequence's last row had drafts; 0: all before
        its next row
    :ivar num_first_blocks: full blocks that the sequence had when the table was filled
    :ivar num_known_blocks: leading blocks whose KV was cached then, with or without a state at their end
    :ivar output_state: the hash under which a state amid the sequence's output is kept; None: none is
    :ivar cache_keys: everything beside the tokens that the KV depends on: adapter, image content, cache salt
    :ivar most_shared: how many leading tokens may have KV computed by other sequences (0 if every prompt logit is
        needed); None: all but the last
    :ivar hashes: chain hashes of the sequence's leading full blocks, as far as they are computed
    :ivar num_published: leading blocks that are published under their hash
    :ivar source: the kept slot from which the table's first KV was copied (contiguous); None: none
    :ivar num_out_of_window: leading blocks that were freed because they are outside every sliding window
    :ivar keeps_all: whether blocks outside every window stay, because others are to find all of them
    :ivar epoch: the manager's epoch when the table was filled: KV from before a reset is never shared
    """

    __slots__ = (
        "cache_keys",
        "capacity",
        "epoch",
        "hashes",
        "ids",
        "keeps_all",
        "most_shared",
        "next_commit",
        "num_first_blocks",
        "num_known_blocks",
        "num_out_of_window",
        "num_published",
        "output_state",
        "source",
        "state_end",
        "state_slot",
        "version",
    )

    def __init__(
        self,
        cache_keys: tuple[CacheKey, ...] = (),
        *,
        most_shared: int | None = None,
        hashes: Sequence[bytes] = (),
        keeps_all: bool = False,
    ) -> None:
        self.ids: list[int] = []
        self.capacity: int = 0
        self.next_commit: int = 0
        self.cache_keys: tuple[CacheKey, ...] = cache_keys
        self.most_shared: int | None = most_shared
        self.hashes: list[bytes] = list(hashes)
        self.num_published: int = 0
        self.source: int | None = None
        self.num_out_of_window: int = 0
        self.keeps_all: bool = keeps_all
        self.epoch: int = 0
        self.version: int = 0
        self.state_slot: int = 0
        self.state_end: int = 0
        self.num_first_blocks: int = 0
        self.num_known_blocks: int = 0
        self.output_state: bytes | None = None

    def may_share(self, num_tokens: int) -> int:
        """Return how many of a sequence's leading tokens may have KV computed by other sequences."""
        return num_tokens - 1 if self.most_shared is None else min(self.most_shared, num_tokens - 1)

    def depend_on(self, key: CacheKey) -> None:
        """Add a key that the KV depends on; the table must be empty."""
        assert not self.ids, "the table is in use"
        self.cache_keys = (*self.cache_keys, key)
        self.hashes = []


@frozen
class KvCopy:
    """Describes KV to copy on the device before a step writes.

    :ivar src: block or slot to read
    :ivar dst: block or slot to write; no other copy of the same step touches it
    :ivar num_tokens: leading tokens to copy; a whole block when paged
    """

    src: int
    dst: int
    num_tokens: int


@frozen
class StateCopy:
    """Describes a sequence's state in recurrent layers to copy on the device before a step.

    :ivar src: slot to read
    :ivar dst: slot to write; no other copy of the same step writes it
    """

    src: int
    dst: int


@frozen
class StoredBlock:
    """Pairs a block of the pool with the hash of its content, which a store outside the pool knows it by.

    :ivar block_id: the block to read from, or to write to
    :ivar digest: the block's chain hash
    """

    block_id: int
    digest: bytes


@frozen
class Prefix:
    """Refers to cached KV for the start of a sequence; valid until the manager next changes.

    :ivar num_tokens: leading tokens that need not be computed; always fewer than the sequence has
    :ivar ids: the blocks or the slot that hold them
    :ivar awaited: a running sequence is computing the next block: waiting for it avoids computing it twice
    :ivar keeps_all: see :class:`KvTable`
    """

    num_tokens: int
    ids: tuple[int, ...]
    awaited: bool = False
    keeps_all: bool = False


@frozen
class KvUsage:
    """Counts blocks (or slots) by use; used + cached + free = total.

    :ivar used: referenced by sequences
    :ivar cached: available, but hold a prefix that can be hit until they are taken
    :ivar free: available and empty
    """

    total: int
    used: int
    cached: int
    free: int


class KvManager(Protocol):
    """Gives the scheduler access to KV memory; the scheduler allocates no block itself.

    The life of a table: ``match`` finds a prefix (changes nothing), ``attach`` takes it, ``grow`` adds capacity before
    a step, ``commit`` records after a step what is computed, ``free`` gives everything back, perhaps long after ``pin``
    has ended the computing. Capacity may be added for a step while an earlier one is in flight: the device executes
    reads and writes in the order of steps.
    """

    @property
    def max_sequence_tokens(self) -> int:
        """Return how many tokens of KV a sequence can hold if it has the whole memory."""
        ...

    @property
    def prefix_queries(self) -> int:
        """Return how many tokens of admitted sequences were looked up in the prefix cache."""
        ...

    @property
    def prefix_hits(self) -> int:
        """Return how many of the ``prefix_queries`` tokens were found."""
        ...

    @property
    def prefix_restored(self) -> int:
        """Return how many tokens' KV came back into the prefix cache from a store."""
        ...

    @property
    def usage(self) -> KvUsage:
        """Return how many blocks (or slots) are used, cached and free."""
        ...

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        """Find the longest start of ``token_ids`` whose KV is cached. Changes no shared state.

        :param table: an empty table of this sequence
        """
        ...

    def hashes_after(self, table: KvTable, token_ids: list[int], prefix: Prefix) -> Sequence[bytes]:
        """Return the hashes of the full blocks after ``prefix``, which ``match`` has just returned for the table, that
        the sequence could share with others if the pool had them. Contiguous KV has none.
        """
        ...

    def restore(self, digests: Sequence[bytes], stored: Collection[bytes]) -> None:
        """Make blocks of the pool the cached blocks of a sequence's start, for a store to fill: see
        :meth:`take_restores`. It stops at the first block that is neither in the pool nor stored, and when no block is
        available.

        :param digests: the hashes of the sequence's first blocks, in order
        :param stored: those whose content the store has
        """
        ...

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens that starts with ``prefix`` fits into the free memory.

        :param num_growing: sequences for each of which one more block must remain
        """
        ...

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Fill an empty table with ``prefix``, which ``match`` has just returned for it."""
        ...

    def grow(self, table: KvTable, start: int, num_tokens: int, *, num_drafts: int = 0) -> int:
        """Add capacity to write the KV of tokens ``start`` to ``start + num_tokens``, in memory that no other table
        refers to.

        :param start: tokens of the sequence that are computed, or will be by steps in flight
        :param num_drafts: how many of the tokens, the last ones, are drafts
        :returns: how many of the tokens fit; may be 0
        """
        ...

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Record that the KV of the first ``num_computed`` of ``token_ids`` is computed, so that it can be shared."""
        ...

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Return a second table with the KV of the first ``num_computed`` tokens."""
        ...

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Empty the table. Its KV can be hit until its memory is needed.

        :param num_computed: leading tokens of ``token_ids`` whose KV the table holds
        """
        ...

    @property
    def can_pin(self) -> bool:
        """Return whether ``pin`` can hold anything."""
        ...

    def pin(self, table: KvTable, num_computed: int) -> bool:
        """Reduce a table, whose sequence computes nothing more, to the memory in which others find its tokens; it holds
        that until ``free``. Idempotent.

        :param num_computed: as for ``free``
        :returns: whether all of it is there; if not, ``free`` of the table must follow
        """
        ...

    def forget(self, table: KvTable) -> None:
        """Withdraw the KV that a table holds or shares from the cache, because it contains NaN, which would spread to
        every sequence that attends to it. ``free`` of the table must follow.
        """
        ...

    def take_copies(self) -> list[KvCopy]:
        """Return the copies to execute before the next step's writes: all reads before all writes, or in the given
        order.
        """
        ...

    def take_state_copies(self) -> list[StateCopy]:
        """Return the copies of states to execute before the next step: all reads before all writes."""
        ...

    def take_restores(self) -> list[StoredBlock]:
        """Return the blocks to fill with stored content, after the copies and before the next step's writes."""
        ...

    def take_published(self) -> list[StoredBlock]:
        """Return the blocks that have become full and findable since the last call, if the manager records them. Their
        content stays as it is at least until the next step is executed.
        """
        ...

    def take_released(self) -> list[int]:
        """Return contiguous slots that will not be used again: their storage may be freed after the copies."""
        ...

    def reset_prefix_cache(self, pinned: Iterable[KvTable] = ()) -> None:
        """Forget every cached prefix. KV of the sequences that are running now is not cached either.

        :param pinned: tables that ``pin`` has reduced, whose prefixes can be found as before
        """
        ...
