"""What an engine's settings come to: builder first, then environment, then what suits model and machine."""

from __future__ import annotations

import torch

from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import PAGED_ATTN, Environment
from paged_sdk.config.paged import PagedAttentionMeta, PagedCacheType
from paged_sdk.errors import ConfigError
from paged_sdk.kv.pool_size import DEFAULT_CUDA_MEMORY, BlockLayout, auto_cpu_blocks, blocks_for, fp8_scale_bytes
from paged_sdk.logs import get_logger
from paged_sdk.runner.device import device_memory

__all__ = ["resolve_engine_config", "resolve_max_model_len"]

_log = get_logger(__name__)

DEFAULT_PREFIX_CACHE_N = 16
DEFAULT_BATCHED_TOKENS = {"cpu": 512}
"""A CPU computes 512 prompt tokens of a small model in about a quarter of a second: texts beside them keep flowing."""
DEFAULT_BATCHED_TOKENS_ELSEWHERE = 2048
PAGED_BY_DEFAULT = frozenset({"cpu", "cuda"})


def resolve_max_model_len(settings: BuildSettings, model: DecoderConfig) -> int:
    """Tokens in a sequence at most.

    :raises ConfigError: more than the model's own context
    """
    asked = settings.max_model_len or model.max_position
    if asked > model.max_position:
        raise ConfigError.of("max_model_len", asked, f"at most the model's context of {model.max_position}")
    return asked


def resolve_engine_config(
    model: DecoderConfig,
    settings: BuildSettings,
    environment: Environment,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> EngineConfig:
    """Fill in what was left open: builder first, then environment, then what suits model and machine.

    Called once the weights are loaded: what is free then is what the KV pool can have.

    :raises OutOfMemoryError: the KV pool does not fit
    """
    prefix_cache_n = next(
        n for n in (settings.prefix_cache_n, environment.prefix_cache_n, DEFAULT_PREFIX_CACHE_N) if n is not None
    )
    meta = _paged_meta(settings, environment, device)
    return EngineConfig(
        paged=meta is not None,
        num_blocks=0
        if meta is None
        else _num_blocks(
            meta, model, dtype=dtype, device=device, max_num_seqs=settings.max_num_seqs, max_model_len=max_model_len
        ),
        block_size=PagedAttentionMeta().block_size if meta is None else meta.block_size,
        cache_type=PagedCacheType.AUTO if meta is None else meta.cache_type,
        prefix_cache_n=prefix_cache_n,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens
        or DEFAULT_BATCHED_TOKENS.get(device.type, DEFAULT_BATCHED_TOKENS_ELSEWHERE),
        max_model_len=max_model_len,
        max_queue=settings.max_queue,
        sliding_window=model.window,
    )


def _paged_meta(settings: BuildSettings, environment: Environment, device: torch.device) -> PagedAttentionMeta | None:
    """The settings of the pool, or None for contiguous KV."""
    asked = settings.paged_attn if settings.paged_attn is not None else environment.paged_attn
    if asked is None and device.type not in PAGED_BY_DEFAULT:
        _log.info("paged attention is off by default on %s; %s=on or with_paged_attn() turn it on", device, PAGED_ATTN)
        return None
    if asked is False:
        return None
    return settings.paged_meta or environment.paged_meta or PagedAttentionMeta()


def _num_blocks(
    meta: PagedAttentionMeta,
    model: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """:raises OutOfMemoryError: the pool does not fit the device"""
    is_fp8 = meta.cache_type is PagedCacheType.F8E4M3
    layout = BlockLayout(
        block_size=meta.block_size,
        elements_per_token=model.kv_elements_per_token,
        bytes_per_element=1 if is_fp8 else dtype.itemsize,
        scale_bytes_per_token=fp8_scale_bytes(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads)
        if is_fp8
        else 0,
    )
    memory = device_memory(device)
    if meta.gpu_memory is not None:
        return blocks_for(meta.gpu_memory, layout, memory)
    if device.type == "cuda":
        return blocks_for(DEFAULT_CUDA_MEMORY, layout, memory)
    return auto_cpu_blocks(layout, memory, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
