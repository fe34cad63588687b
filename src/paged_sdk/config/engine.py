"""Hold the resolved settings of one engine; defaults and the environment are already applied."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, is_slowdown
from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.prefix_cache_dir import PrefixCacheDir

__all__ = ["DRAFTS_UNASKED", "EngineConfig"]

DRAFTS_UNASKED: Final = 8
"""Drafts that states have room for without speculation: these take 5 MB beside the 20 MB of a state of Qwen3.5-0.8B,
and give a step nine tokens. On the CPU matrices are read once for every eight."""


@frozen(kw_only=True)
class EngineConfig:
    """Holds the settings of the scheduler and of the KV memory.

    :ivar paged: True: paged KV in blocks; False: contiguous KV per sequence
    :ivar gpu_memory: size of the pool; None: the device's default
    :ivar num_blocks: blocks in the pool; 0 if the pool has not been sized yet, or KV is contiguous
    :ivar block_size: tokens per block
    :ivar cache_type: storage type of KV elements
    :ivar prefix_cache_n: 0: prefix cache off; otherwise on with paged KV, and the number of finished sequences to keep
        with contiguous KV, or the number of states of prefixes to keep of a model with recurrent layers
    :ivar prefix_cache_dir: where blocks of the prefix cache are stored outside the pool; None: nowhere
    :ivar max_num_seqs: maximum number of sequences that hold KV at once
    :ivar max_num_batched_tokens: token budget of one step
    :ivar max_slowdown: maximum factor by which prefill may lengthen a step for decoding sequences; 0: no limit but the
        token budget
    :ivar gamma: maximum number of draft tokens per sequence and step; 0: no drafts
    :ivar max_model_len: maximum number of tokens of a sequence, prompt and output together
    :ivar max_queue: maximum number of waiting requests
    :ivar sliding_window: the widest window if every layer has one, else None
    :ivar rope_switch: sequence length in tokens beyond which all keys use other rotary frequencies (LongRoPE); None:
        frequencies never change
    """

    paged: bool = True
    gpu_memory: MemoryGpuConfig | None = None
    num_blocks: int = field(default=0, validator=IntAtLeast(0))
    block_size: int = field(default=32, validator=IntAtLeast(1))
    cache_type: PagedCacheType = PagedCacheType.AUTO
    prefix_cache_n: int = field(default=16, validator=IntAtLeast(0))
    prefix_cache_dir: PrefixCacheDir | None = None
    max_num_seqs: int = field(default=32, validator=IntAtLeast(1))
    max_num_batched_tokens: int = field(default=512, validator=IntAtLeast(1))
    max_slowdown: float = field(default=0.0, validator=is_slowdown)
    gamma: int = field(default=0, validator=IntAtLeast(0))
    max_model_len: int = field(default=4096, validator=IntAtLeast(1))
    max_queue: int = field(default=4096, validator=IntAtLeast(1))
    sliding_window: int | None = field(default=None, validator=IntAtLeast(1, optional=True))
    rope_switch: int | None = field(default=None, validator=IntAtLeast(1, optional=True))

    @property
    def num_kept_states(self) -> int:
        """Return how many states of prefixes are kept of a model with recurrent layers: only paged KV finds prefixes by
        blocks, at whose ends states can be.
        """
        return self.prefix_cache_n if self.paged else 0

    @property
    def drafts_per_state(self) -> int:
        """Return for how many drafts of a sequence a model with recurrent layers has room beside each state. With
        ``gamma`` 0, constraints and predictions have drafts all the same.
        """
        return self.gamma or DRAFTS_UNASKED

    @property
    def num_state_slots(self) -> int:
        """Return how many states a model with recurrent layers needs room for."""
        return self.max_num_seqs + self.num_kept_states
