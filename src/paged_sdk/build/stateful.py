"""Checks what models with recurrent layers do not go together with, and counts their states' memory."""

from __future__ import annotations

import torch
from attrs import evolve

from paged_sdk.attention.recurrent import state_bytes
from paged_sdk.build.sizing import paging_asked
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import PREFIX_CACHE_N, Environment
from paged_sdk.errors import ConfigError, OutOfMemoryError
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.runner.device import device_memory

__all__ = ["check_stateful", "fit_kept_states", "refuse_ranks", "states_of", "with_states"]

_log = get_logger(__name__)


def check_stateful(
    shape: DecoderConfig, settings: BuildSettings, environment: Environment, placement: Placement
) -> None:
    """Check that no setting asks for something that recurrent layers, or layers of an MLP alone, do not go together
    with.

    :raises ConfigError: one does, or the topology names several devices
    """
    if not placement.is_one_device and (shape.recurrent_layers or len(shape.attention_layers) < shape.num_layers):
        kinds = "recurrent layers" if shape.recurrent_layers else "layers without attention"
        raise ConfigError.of("Topology.devices", str(placement), f"one device for {shape.model_type}'s {kinds}")
    if not shape.recurrent_layers:
        return
    asked: tuple[str, object] = ("with_prefix_cache_n", settings.prefix_cache_n)
    if settings.prefix_cache_n is None:
        asked = (PREFIX_CACHE_N, environment.prefix_cache_n)
    if paging_asked(settings, environment) is False and asked[1]:
        reason = f"{shape.model_type} has recurrent layers, whose states are kept for paged KV only"
        raise ConfigError.of(*asked, f"0 without paged attention: {reason}")


def refuse_ranks(shape: DecoderConfig, setting: str, size: int) -> None:
    """Check that a model is not to be divided if it has recurrent layers.

    :raises ConfigError: it is
    """
    if shape.recurrent_layers:
        raise ConfigError.of(setting, size, f"1: recurrent layers, which {shape.model_type} has, are not divided")


def fit_kept_states(
    config: EngineConfig,
    shape: DecoderConfig,
    dtype: torch.dtype,
    *,
    device: torch.device,
    taken: int = 0,
    beside: int = 0,
) -> EngineConfig:
    """Return the configuration with as many states of prefixes as fit, at most those that are asked for. They may take
    half of the memory that weights and the states of running sequences leave; the other half is left to KV and steps.

    :param dtype: the model's dtype
    :param device: the device of the recurrent layers
    :param taken: bytes of its free memory that something else will take
    :param beside: bytes of each running sequence's state in a draft model that is there, too
    :raises OutOfMemoryError: the states of running sequences do not fit
    """
    if not shape.recurrent_layers and not beside:
        return config
    each, free = state_bytes(shape, dtype, config.drafts_per_state), max(0, device_memory(device).free - taken)
    running = config.max_num_seqs * (each + beside)
    if running > free:
        raise OutOfMemoryError(
            f"the states of recurrent layers of {config.max_num_seqs} sequences need {running / 2**20:.1f} MiB, but "
            f"{free / 2**20:.1f} MiB are available, for {free // (each + beside)} sequences (with_max_num_seqs)",
            needed=running,
            available=free,
        )
    kept = min(config.num_kept_states, (free - running) // 2 // each) if each else config.num_kept_states
    if kept == config.num_kept_states:
        return config
    _log.info(
        "States of %d prefixes are kept, not of %d: each takes %.1f MiB.", kept, config.num_kept_states, each / 2**20
    )
    return evolve(config, prefix_cache_n=kept)


def states_of(shape: DecoderConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the states of recurrent layers, of running sequences and of prefixes that are kept.

    :param dtype: the model's dtype
    """
    return config.num_state_slots * state_bytes(shape, dtype, config.drafts_per_state)


def with_states(
    activations: dict[torch.device, int],
    shape: DecoderConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> dict[torch.device, int]:
    """Return the bytes that a model needs on each device besides KV, with those of its sequences' states.

    :param activations: the bytes without states
    :param device: the device of the recurrent layers
    """
    if not shape.recurrent_layers:
        return activations
    num_bytes = states_of(shape, config, dtype)
    _log.info(
        "States of recurrent layers of %s: %.1f MiB for %d sequences and %d kept prefixes.",
        shape.model_type,
        num_bytes / 2**20,
        config.max_num_seqs,
        config.num_kept_states,
    )
    return {**activations, device: activations.get(device, 0) + num_bytes}
