"""Resolves an engine's settings: from the builder, then the environment, then defaults for the model and machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_sdk.config.build import BuildSettings, DraftSource, ModelSource
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import PAGED_ATTN, Environment
from paged_sdk.config.paged import PagedAttentionMeta
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger

__all__ = ["paging_asked", "pool_asked", "resolve_draft", "resolve_engine_config", "resolve_max_model_len"]

_log = get_logger(__name__)

DEFAULT_PREFIX_CACHE_N = 16
DEFAULT_BATCHED_TOKENS = {"cpu": 512}
"""Prefilling 512 tokens of a small model takes a CPU about a quarter of a second, an acceptable wait for others."""
DEFAULT_BATCHED_TOKENS_ELSEWHERE = 2048
DEFAULT_SLOWDOWN = {"cpu": 3.0}
"""Beside 8 decoding sequences of SmolLM2, a prompt of 3,000 tokens takes 2.0 times as long as alone, and 99 % of the
sequences' tokens at most 4.3 times as long; without limit, 1.0 and 32 times. On other devices this was not measured,
and steps use their whole token budget by default."""
PAGED_BY_DEFAULT = frozenset({"cpu", "cuda"})


def resolve_max_model_len(settings: BuildSettings, model: DecoderConfig) -> int:
    """Return the maximum number of tokens of a sequence.

    :raises ConfigError: the setting exceeds the model's context
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
    devices: Sequence[torch.device],
    max_model_len: int,
    has_mtp: bool = False,
) -> EngineConfig:
    """Resolve the engine's settings: from the builder, then the environment, then defaults for the model and machine.

    The number of blocks stays 0, because it depends on the memory that the weights leave: see
    :func:`~paged_sdk.build.kv_memory.size_pool`.

    :param devices: the devices that hold part of the model
    :param has_mtp: whether the model drafts with its layer for multi-token prediction
    """
    # A step takes as long as its slowest device.
    device = next((each for each in devices if each.type == "cpu"), devices[0])
    prefix_cache_n = next(
        n for n in (settings.prefix_cache_n, environment.prefix_cache_n, DEFAULT_PREFIX_CACHE_N) if n is not None
    )
    if model.bidirectional:  # KV of a prefix depends on the tokens after it
        prefix_cache_n = 0
    asked = _paged_meta(settings, environment, devices)
    if model.recurrent_layers and asked is None and prefix_cache_n:  # unset, or refused before: see check_stateful
        _log.info("No prefix cache: contiguous KV keeps no states of the recurrent layers of %s.", model.model_type)
        prefix_cache_n = 0
    meta = asked or PagedAttentionMeta()
    return EngineConfig(
        paged=asked is not None,
        gpu_memory=meta.gpu_memory,
        block_size=meta.block_size,
        cache_type=meta.cache_type,
        prefix_cache_n=prefix_cache_n,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens
        or DEFAULT_BATCHED_TOKENS.get(device.type, DEFAULT_BATCHED_TOKENS_ELSEWHERE),
        max_slowdown=DEFAULT_SLOWDOWN.get(device.type, 0.0) if settings.max_slowdown is None else settings.max_slowdown,
        gamma=_gamma(settings, environment, has_mtp=has_mtp),
        max_model_len=max_model_len,
        max_queue=settings.max_queue,
        sliding_window=model.window,
        rope_switch=model.rope_switch,
    )


def resolve_draft(settings: BuildSettings, environment: Environment) -> DraftSource | None:
    """Return the draft model to load; None: no draft model."""
    location = environment.draft_model
    if settings.draft is not None or location is None or settings.gamma == 0 or settings.mtp:
        return settings.draft
    # Without .gguf in the name, the format depends on the files in the directory or repository.
    model = ModelSource(location=location, gguf=True if location.lower().endswith("gguf") else None)
    return DraftSource(model=model, settings=BuildSettings())


def paging_asked(settings: BuildSettings, environment: Environment) -> bool | None:
    """Return whether paged attention is asked for or forbidden; None: neither."""
    return environment.paged_attn if settings.paged_attn is None else settings.paged_attn


def pool_asked(settings: BuildSettings, environment: Environment) -> PagedAttentionMeta | None:
    """Return the settings of the pool that are asked for, should KV be paged; None: the defaults."""
    return settings.paged_meta or environment.paged_meta


def _gamma(settings: BuildSettings, environment: Environment, *, has_mtp: bool) -> int:
    if settings.gamma is not None:
        return settings.gamma
    drafts = environment.draft_model is not None or has_mtp
    return environment.gamma or (SpeculativeConfig().gamma if drafts else 0)


def _paged_meta(
    settings: BuildSettings, environment: Environment, devices: Sequence[torch.device]
) -> PagedAttentionMeta | None:
    """Return the settings of the pool, or None for contiguous KV."""
    asked = paging_asked(settings, environment)
    device = next((each for each in devices if each.type not in PAGED_BY_DEFAULT), None)
    if asked is None and device is not None:
        _log.info("paged attention is off by default on %s; %s=on or with_paged_attn() turn it on", device, PAGED_ATTN)
        return None
    if asked is False:
        return None
    return pool_asked(settings, environment) or PagedAttentionMeta()
