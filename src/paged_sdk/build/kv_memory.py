"""Sizes the KV pool of an engine, and makes the manager of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.kv.pool_size import DEFAULT_CUDA_MEMORY, BlockLayout, auto_cpu_blocks, blocks_for, fp8_scale_bytes
from paged_sdk.logs import get_logger
from paged_sdk.runner.device import device_memory

__all__ = ["make_kv_manager", "size_pool"]

_log = get_logger(__name__)


def size_pool(
    config: EngineConfig,
    models: Sequence[DecoderConfig],
    *,
    dtype: torch.dtype,
    device: torch.device,
    activations: int = 0,
) -> EngineConfig:
    """Return the configuration with the number of blocks filled in, if it is paged.

    To be called once the weights are loaded, because the pool takes memory that is free then.

    :param models: those that are to have KV for as many tokens
    :param dtype: dtype of keys and values, where the cache stores the model's dtype
    :param activations: bytes that steps need beside weights and KV
    :raises OutOfMemoryError: the pool does not fit the device
    """
    if not config.paged:
        return config
    elements_per_token = sum(model.kv_elements_per_token for model in models)
    elements = {"block_size": config.block_size, "elements_per_token": elements_per_token}
    fp8 = BlockLayout(
        **elements,
        bytes_per_element=1,
        scale_bytes_per_token=sum(
            fp8_scale_bytes(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads) for model in models
        ),
    )
    layout = (
        fp8
        if config.cache_type is PagedCacheType.F8E4M3
        else BlockLayout(**elements, bytes_per_element=dtype.itemsize, fp8_block_bytes=fp8.block_bytes)
    )
    memory = device_memory(device)
    memory = evolve(memory, free=max(0, memory.free - activations))
    pool = config.gpu_memory or (DEFAULT_CUDA_MEMORY if device.type == "cuda" else None)
    num_blocks = (
        auto_cpu_blocks(layout, memory, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len)
        if pool is None
        else blocks_for(pool, layout, memory)
    )
    return evolve(config, num_blocks=num_blocks)


def make_kv_manager(config: EngineConfig) -> KvManager:
    """Make the manager that keeps track of blocks or slots."""
    kind = "block-level, PagedAttention" if config.paged else "sequence-level, non-paged attention"
    _log.info("Prefix caching %s (%s).", "enabled" if config.prefix_cache_n else "disabled", kind)
    if not config.paged:
        return SequenceKvManager(
            max_sequence_tokens=config.max_model_len, max_num_seqs=config.max_num_seqs, num_kept=config.prefix_cache_n
        )
    return KvCacheManager(
        config.num_blocks,
        config.block_size,
        prefix_caching=config.prefix_cache_n > 0,
        sliding_window=config.sliding_window,
    )
