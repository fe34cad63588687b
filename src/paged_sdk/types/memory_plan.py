"""Shows what memory a model would take."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen

__all__ = ["MemoryPlan"]


@frozen(kw_only=True)
class MemoryPlan:
    """Says what memory a model would take.

    :ivar model: the checkpoint's name
    :ivar model_type: the family it is of, and
    :ivar architecture: its decoder's: another where it has an image encoder
    :ivar devices: what it would run on
    :ivar dtype: of activations, and of keys and values unless the cache is FP8
    :ivar isq: what weights would be quantized to while loading; None: they stay as they are stored
    :ivar weight_bytes: of all tensors as they would be held, within some percent; an image encoder counts where the
        checkpoint has one
    :ivar paged: whether keys and values would be in blocks
    :ivar cache_type: what they are stored as: "auto" is the dtype
    :ivar block_size: tokens in a block
    :ivar bytes_per_token: of keys and values of one token
    :ivar num_blocks: in the pool; 0: the cache is not paged
    :ivar kv_bytes: of keys and values; of a cache that is not paged: of one sequence as long as can be
    :ivar kv_tokens: how many tokens these have room for
    :ivar max_model_len: the most tokens that a sequence may have
    :ivar max_num_seqs: sequences that are computed at once
    """

    model: str
    model_type: str
    architecture: str
    devices: tuple[str, ...]
    dtype: str
    isq: str | None
    weight_bytes: int
    paged: bool
    cache_type: str
    block_size: int
    bytes_per_token: float
    num_blocks: int
    kv_bytes: int
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return asdict(self)
