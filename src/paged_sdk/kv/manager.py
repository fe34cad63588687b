"""Define what the scheduler knows of KV memory: one protocol, whether the memory is paged or contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from paged_sdk.kv.block_hash import CacheKey

__all__ = ["KvCopy", "KvManager", "KvTable", "KvUsage", "Prefix"]


class KvTable:
    """Holds the KV memory of one sequence: it lives as long as the sequence and is empty while the sequence waits.

    Outside ``kv/``, only ``ids``, ``version``, ``capacity`` and ``next_commit`` are of interest; the rest is the
    manager's own.

    :ivar ids: block table (paged), or the one slot (contiguous)
    :ivar version: changes when an entry of ``ids`` that will be read changes. While it is the same the table has only
        grown at its end, so a reader that knows the earlier table needs to read the new end only
    :ivar capacity: tokens of the sequence that may be written without asking ``grow``
    :ivar next_commit: computed tokens from which ``commit`` has something to do
    :ivar cache_keys: what, beside the tokens, the KV depends on: adapter, image content, cache salt
    :ivar share: whether to look for KV computed by others (no for a sequence that needs every prompt logit)
    :ivar most_shared: how many leading tokens may have KV computed by others; None: all but the last
    :ivar hashes: chain hashes of the leading full blocks of the sequence's tokens, as far as they are known
    :ivar num_published: leading blocks that are already known by their hash
    :ivar num_out_of_window: leading blocks given back because they are out of every sliding window
    :ivar epoch: the manager's epoch when the table was filled: KV from before a reset is never shared
    """

    __slots__ = (
        "cache_keys",
        "capacity",
        "epoch",
        "hashes",
        "ids",
        "most_shared",
        "next_commit",
        "num_out_of_window",
        "num_published",
        "share",
        "version",
    )

    def __init__(
        self,
        cache_keys: tuple[CacheKey, ...] = (),
        *,
        share: bool = True,
        most_shared: int | None = None,
        hashes: Sequence[bytes] = (),
    ) -> None:
        self.ids: list[int] = []
        self.capacity: int = 0
        self.next_commit: int = 0
        self.cache_keys: tuple[CacheKey, ...] = cache_keys
        self.share: bool = share
        self.most_shared: int | None = most_shared
        self.hashes: list[bytes] = list(hashes)
        self.num_published: int = 0
        self.num_out_of_window: int = 0
        self.epoch: int = 0
        self.version: int = 0

    def may_share(self, num_tokens: int) -> int:
        """Return how many of a sequence's first tokens may have KV computed by others."""
        return num_tokens - 1 if self.most_shared is None else min(self.most_shared, num_tokens - 1)

    def depend_on(self, key: CacheKey) -> None:
        """Let the KV, of which there must be none yet, depend on one thing more."""
        assert not self.ids, "the table is in use"
        self.cache_keys = (*self.cache_keys, key)
        self.hashes = []


@frozen
class KvCopy:
    """Says which KV is to be copied on the device before a step writes.

    :ivar src: block or slot to read
    :ivar dst: block or slot to write; no other copy of the same step touches it
    :ivar num_tokens: leading tokens to copy; a whole block when paged
    """

    src: int
    dst: int
    num_tokens: int


@frozen
class Prefix:
    """Refers to KV that was found for the start of a sequence; it is valid until the manager is next changed.

    :ivar num_tokens: leading tokens that need not be computed; always fewer than the sequence has
    :ivar ids: the blocks that hold them, or the slot
    :ivar awaited: the next block is being computed by a running sequence: waiting for it saves computing it twice
    """

    num_tokens: int
    ids: tuple[int, ...]
    awaited: bool = False


@frozen
class KvUsage:
    """Counts blocks (or slots) by their use; used + cached + free = total.

    :ivar used: held by sequences
    :ivar cached: available, and until taken a prefix that may be hit
    :ivar free: available, and empty
    """

    total: int
    used: int
    cached: int
    free: int


class KvManager(Protocol):
    """Shows KV memory to the scheduler, which allocates no block itself.

    The life of a table: ``match`` finds a prefix (changes nothing), ``attach`` takes it, ``grow`` adds capacity before
    a step, ``commit`` says after a step what is computed, ``free`` gives everything back. Capacity may be added for a
    step while an earlier one is still being computed: what the device writes and reads, it does in the order of the
    steps.
    """

    @property
    def max_sequence_tokens(self) -> int:
        """Return how many tokens of KV the largest sequence can hold when it has the whole memory."""
        ...

    @property
    def prefix_queries(self) -> int:
        """Return how many tokens of admitted sequences were looked up in the prefix cache."""
        ...

    @property
    def prefix_hits(self) -> int:
        """Return how many tokens of ``prefix_queries`` were found."""
        ...

    @property
    def usage(self) -> KvUsage:
        """Return how many blocks (or slots) are used, cached and free."""
        ...

    def match(self, table: KvTable, token_ids: list[int]) -> Prefix:
        """Find the longest start of ``token_ids`` whose KV is there already. This changes nothing that others see.

        :param table: an empty table of this sequence
        """
        ...

    def fits(self, prefix: Prefix, num_tokens: int, *, num_growing: int) -> bool:
        """Tell whether a sequence of ``num_tokens`` tokens that starts with ``prefix`` fits into what is free now.

        :param num_growing: sequences that may each need a block more soon, and are to have it
        """
        ...

    def attach(self, table: KvTable, prefix: Prefix, token_ids: list[int]) -> None:
        """Fill an empty table with ``prefix``, which ``match`` has just found for it."""
        ...

    def grow(self, table: KvTable, start: int, num_tokens: int) -> int:
        """Add capacity to write the KV of tokens ``start`` to ``start + num_tokens``, in memory that no other table
        refers to.

        :param start: tokens of the sequence that are computed, or will be by steps under way
        :returns: how many of the tokens fit, 0 if none does
        """
        ...

    def commit(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Note that the KV of the first ``num_computed`` of ``token_ids`` is computed, so that others may share it."""
        ...

    def fork(self, table: KvTable, num_computed: int) -> KvTable:
        """Make a second table with the same first ``num_computed`` tokens of KV."""
        ...

    def free(self, table: KvTable, token_ids: list[int], num_computed: int) -> None:
        """Empty the table. What it held can be hit until its memory is needed.

        :param num_computed: leading tokens of ``token_ids`` whose KV it holds
        """
        ...

    def forget(self, table: KvTable, token_ids: list[int]) -> None:
        """Let no sequence find the KV of a table's tokens any more, whoever computed it: it holds NaN, which would make
        NaN of all that attend to it. The table is to be freed next.
        """
        ...

    def take_copies(self) -> list[KvCopy]:
        """Return the copies to do before the next step's writes, all reads before all writes or in this order."""
        ...

    def take_released(self) -> list[int]:
        """Return slots of contiguous KV that will not be used again: their storage may be freed after the copies."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every shared prefix, including those that running sequences would still leave behind."""
        ...
