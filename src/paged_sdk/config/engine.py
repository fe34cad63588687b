"""Hold the resolved settings of one engine, for which the environment is not read any more."""

from __future__ import annotations

from attrs import field, frozen

from paged_sdk.config.checks import IntAtLeast, is_slowdown
from paged_sdk.config.memory import MemoryGpuConfig
from paged_sdk.config.paged import PagedCacheType

__all__ = ["EngineConfig"]


@frozen(kw_only=True)
class EngineConfig:
    """Holds the settings of the scheduler and of the KV memory.

    :ivar paged: block-level paged KV; False: contiguous KV per sequence
    :ivar gpu_memory: how much memory the pool may take; None: what suits the device
    :ivar num_blocks: blocks in the pool; 0 if it has not been sized yet, or there is none
    :ivar block_size: tokens per block
    :ivar cache_type: the type that a KV element is stored as
    :ivar prefix_cache_n: 0 turns the prefix cache off; otherwise it is on when paged, and keeps so many finished
        sequences when not
    :ivar max_num_seqs: sequences that hold KV at once
    :ivar max_num_batched_tokens: the token budget of one step
    :ivar max_slowdown: by what factor a text's tokens may take longer beside a prompt; 0: as long as the token budget
        takes
    :ivar gamma: the most drafts of a text in one step, guesses at the tokens that follow; 0: none
    :ivar max_model_len: tokens in a sequence, prompt and output together
    :ivar max_queue: requests that may wait
    :ivar sliding_window: the widest window if every layer has one, else None
    :ivar rope_switch: tokens of a sequence beyond which all its keys are rotated otherwise; None: at no length
    """

    paged: bool = True
    gpu_memory: MemoryGpuConfig | None = None
    num_blocks: int = field(default=0, validator=IntAtLeast(0))
    block_size: int = field(default=32, validator=IntAtLeast(1))
    cache_type: PagedCacheType = PagedCacheType.AUTO
    prefix_cache_n: int = field(default=16, validator=IntAtLeast(0))
    max_num_seqs: int = field(default=32, validator=IntAtLeast(1))
    max_num_batched_tokens: int = field(default=512, validator=IntAtLeast(1))
    max_slowdown: float = field(default=0.0, validator=is_slowdown)
    gamma: int = field(default=0, validator=IntAtLeast(0))
    max_model_len: int = field(default=4096, validator=IntAtLeast(1))
    max_queue: int = field(default=4096, validator=IntAtLeast(1))
    sliding_window: int | None = field(default=None, validator=IntAtLeast(1, optional=True))
    rope_switch: int | None = field(default=None, validator=IntAtLeast(1, optional=True))
