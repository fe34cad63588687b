"""Holds the sequences whose prompts' KV stays in memory until they are released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import InvalidRequestError, PinLimitError
from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.kv.manager import KvManager
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus

__all__ = ["Pins"]


class Pins:
    """Holds the pinned sequences, and limits the blocks that they may hold.

    Until its prompt is computed, a sequence to be pinned waits and runs like any other. Then it only holds its full
    blocks, which sequences with the same prefix find. No number of running sequences takes these from it, except one:
    the first by rank, if it is alone and needs more than the rest of the pool. As long as the rest has room for
    ``max_model_len`` tokens, that cannot happen; in smaller pools it keeps the engine from standing still, and the
    pinned sequence is computed again afterwards.

    :ivar limit: the most blocks that all pinned sequences together may hold: all but those for one sequence of
        ``max_model_len``, or half of the pool if that is more; 0 where there is no prefix cache of blocks alone
    """

    def __init__(self, config: EngineConfig, kv: KvManager) -> None:
        longest = -(-config.max_model_len // config.block_size)
        self.limit: int = max(config.num_blocks - longest, config.num_blocks // 2) if kv.can_pin else 0
        self._block_size = config.block_size
        self._kv = kv
        self._held: list[Sequence] = []
        self._reserved: dict[int, list[bytes]] = {}  # by sequence id
        self._num_pins: Counter[bytes] = Counter()  # by block hash
        self._num_blocks = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held)

    def __len__(self) -> int:
        """Return how many sequences hold their KV now."""
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks they hold; a block that several have in common counts once."""
        return self._num_blocks

    @property
    def latest(self) -> Sequence:
        """Return the sequence that has been pinned last. There must be one."""
        return self._held[-1]

    def reserve(self, sequence: Sequence) -> None:
        """Count the blocks of a new sequence against the limit, until :meth:`release`.

        :raises PinLimitError: it would be exceeded
        :raises InvalidRequestError: nothing can be pinned here
        """
        if not self.limit:
            raise InvalidRequestError(
                "the prefix cannot be pinned: it takes a prefix cache of blocks, and a model without recurrent layers",
                request_id=sequence.request.request_id,
                field="pin",
            )
        table = sequence.table
        rest = block_hashes(sequence.token_ids, self._block_size, table.cache_keys, known=table.hashes)
        hashes = [*table.hashes, *rest]
        num_new, num_reserved = sum(digest not in self._num_pins for digest in hashes), len(self._num_pins)
        if num_reserved + num_new > self.limit:
            raise PinLimitError(
                f"the pin needs {num_new} more blocks of {self._block_size} tokens, and {num_reserved} of the "
                f"{self.limit} that may be pinned are taken: release other pins, or give the KV pool more memory",
                request_id=sequence.request.request_id,
                num_blocks=num_new,
                num_pinned=num_reserved,
                limit=self.limit,
            )
        self._reserved[sequence.seq_id] = hashes
        self._num_pins.update(hashes)

    def release(self, sequence: Sequence) -> None:
        """Stop counting a sequence against the limit; others are ignored."""
        hashes = self._reserved.pop(sequence.seq_id, ())
        self._num_pins.subtract(hashes)
        for digest in hashes:
            if not self._num_pins[digest]:
                del self._num_pins[digest]

    def hold(self, sequence: Sequence) -> bool:
        """Pin a sequence whose prompt is computed; return False if some of its KV cannot be found any more."""
        if not self._kv.pin(sequence.table, sequence.num_computed_tokens):
            return False
        sequence.status = SequenceStatus.PINNED
        self._held.append(sequence)
        self._count()
        return True

    def still_holds(self, sequence: Sequence) -> bool:
        """Return whether all of a pinned sequence's KV can be found."""
        return self._kv.pin(sequence.table, sequence.num_computed_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Free the memory of a pinned sequence."""
        self._held.remove(sequence)
        self._kv.free(sequence.table, sequence.token_ids, sequence.num_computed_tokens)
        self._count()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix but the pinned ones."""
        self._kv.reset_prefix_cache([sequence.table for sequence in self._held])

    def _count(self) -> None:
        self._num_blocks = len({block_id for sequence in self._held for block_id in sequence.table.ids})
