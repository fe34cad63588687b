"""Sizes an engine's KV pool, and makes its KV manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.memory import MB, ContextSize
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.errors import OutOfMemoryError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.kv.pool_size import (
    DEFAULT_CUDA_MEMORY,
    BlockLayout,
    DeviceMemory,
    auto_cpu_blocks,
    blocks_for,
    fp8_scale_bytes,
    free_blocks,
    q4_scale_bytes,
)
from paged_sdk.kv.states import StatefulKvManager
from paged_sdk.logs import get_logger
from paged_sdk.runner.device import device_memory

__all__ = ["block_layout", "make_kv_manager", "size_pool", "size_pools"]

_log = get_logger(__name__)


def size_pools(
    config: EngineConfig,
    models: Sequence[tuple[DecoderConfig, Placement]],
    *,
    dtype: torch.dtype,
    activations: Mapping[torch.device, int],
) -> EngineConfig:
    """Return the configuration with the number of blocks filled in, if KV is paged: the number that every device holds.

    A block has the same id on all devices; each device stores the part of its own layers. ``MB`` sets the total over
    all devices; the other sizes apply to each device.

    :param models: the models that share the pool's size in tokens, each with its placement
    :param dtype: dtype of KV elements if the cache uses the model's dtype
    :param activations: by device, bytes that steps need besides weights and KV
    :raises OutOfMemoryError: the pool does not fit a device, which the error names
    """
    devices = tuple(dict.fromkeys(device for _, placement in models for device in placement.layers))
    if len(devices) == 1 or not config.paged:
        (device,) = devices[:1]
        bytes_of_steps = activations.get(device, 0)
        shapes = [model for model, _ in models]
        return size_pool(config, shapes, dtype=dtype, device=device, activations=bytes_of_steps)
    asked = config
    if isinstance(config.gpu_memory, MB):
        whole, memories = block_layout(config, [model for model, _ in models], dtype), map(device_memory, devices)
        total, free = (sum(each) for each in zip(*((memory.total, memory.free) for memory in memories), strict=True))
        num_blocks = blocks_for(config.gpu_memory, whole, DeviceMemory(total=total, free=free))
        asked = evolve(config, gpu_memory=ContextSize(num_blocks * config.block_size))
    sized: list[EngineConfig] = []
    for device in devices:
        there = [model.of_layers(layers) for model, placement in models if (layers := placement.layers_on(device))]
        bytes_of_steps = activations.get(device, 0)
        try:
            sized.append(size_pool(asked, there, dtype=dtype, device=device, activations=bytes_of_steps))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"on {device}: {error}",
                needed=error.needed,
                available=error.available,
                largest_context=error.largest_context,
            ) from None
    fewest = min(each.num_blocks for each in sized)
    return evolve(config, num_blocks=fewest)


def size_pool(
    config: EngineConfig,
    models: Sequence[DecoderConfig],
    *,
    dtype: torch.dtype,
    device: torch.device,
    activations: int = 0,
) -> EngineConfig:
    """Return the configuration with the number of blocks filled in, if KV is paged.

    Call this after the weights are loaded: the pool takes memory that is free at the time of the call.

    :param models: the models that share the pool's size in tokens
    :param dtype: dtype of KV elements if the cache uses the model's dtype
    :param activations: bytes that steps need besides weights and KV
    :raises OutOfMemoryError: the pool does not fit the device
    """
    if not config.paged:
        return config
    layout = block_layout(config, models, dtype)
    memory = device_memory(device)
    memory = evolve(memory, free=max(0, memory.free - activations))
    if layout.block_bytes == 0 and not isinstance(config.gpu_memory, ContextSize):
        blocks = free_blocks(
            block_size=config.block_size, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len
        )
        return evolve(config, num_blocks=blocks)
    pool = config.gpu_memory or (DEFAULT_CUDA_MEMORY if device.type == "cuda" else None)
    num_blocks = (
        auto_cpu_blocks(layout, memory, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len)
        if pool is None
        else blocks_for(pool, layout, memory)
    )
    return evolve(config, num_blocks=num_blocks)


def block_layout(config: EngineConfig, models: Sequence[DecoderConfig], dtype: torch.dtype) -> BlockLayout:
    """Return the memory layout of a block, over all of the models."""
    elements_per_token = sum(model.kv_elements_per_token for model in models)
    elements = {"block_size": config.block_size, "elements_per_token": elements_per_token}
    fp8 = BlockLayout(
        **elements,
        bytes_per_element=1,
        scale_bytes_per_token=fp8_scale_bytes(sum(model.kv_vectors_per_token for model in models)),
    )
    if config.cache_type is PagedCacheType.F8E4M3:
        return fp8
    if config.cache_type is PagedCacheType.Q4:
        return BlockLayout(**elements, bytes_per_element=0.5, scale_bytes_per_token=q4_scale_bytes(elements_per_token))
    return BlockLayout(**elements, bytes_per_element=dtype.itemsize, fp8_block_bytes=fp8.block_bytes)


def make_kv_manager(config: EngineConfig, shape: DecoderConfig) -> KvManager:
    """Make the KV manager: of blocks if KV is paged, otherwise of contiguous KV per sequence; with slots for the states
    of a model with recurrent layers.
    """
    kv = _make_kv_manager(config)
    if not shape.recurrent_layers:
        return kv
    return StatefulKvManager(
        kv,
        num_running=config.max_num_seqs,
        num_kept=config.num_kept_states,
        num_drafts=config.drafts_per_state,
    )


def _make_kv_manager(config: EngineConfig) -> KvManager:
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
        records_published=config.prefix_cache_dir is not None,
    )
