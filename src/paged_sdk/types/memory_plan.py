"""Shows how much memory a model would take."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen

__all__ = ["MemoryPlan"]


@frozen(kw_only=True)
class MemoryPlan:
    """Says how much memory a model would take.

    :ivar model: the checkpoint's name
    :ivar model_type: its family
    :ivar architecture: its decoder's family, which differs if it has an image encoder
    :ivar devices: the devices it would run on
    :ivar dtype: of activations, and of keys and values unless the cache stores codes
    :ivar isq: the type that weights would be quantized to while loading; None: they stay as stored
    :ivar weight_bytes: of all tensors in memory, accurate to within a few percent, including an image encoder
    :ivar paged: whether the KV cache would be paged
    :ivar cache_type: the type of its elements; "auto" is the dtype
    :ivar block_size: tokens per block
    :ivar bytes_per_token: size of one token's keys and values
    :ivar num_blocks: blocks in the pool; 0 if the cache is not paged
    :ivar kv_bytes: size of the pool; without paging, of one sequence of maximum length
    :ivar kv_tokens: the number of tokens that fit into these bytes
    :ivar state_bytes: size of the states of recurrent layers, of running sequences and of prefixes that are kept
    :ivar max_model_len: maximum number of tokens per sequence
    :ivar max_num_seqs: sequences computed at once
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
    state_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return asdict(self)
