"""Compute rotary position embeddings (Su et al., 2021, arXiv 2104.09864) and their extensions to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_sdk.config.decoder import RopeConfig, RopeKind
from paged_sdk.kernels.rotary import Rotation

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding:
    """Holds the rotary frequencies of one kind of layer.

    LongRoPE has two sets of divisors, for sequences within the trained context and beyond it. Keys in the cache were
    rotated with one set and cannot change to the other, so the set is chosen once, for every sequence alike: by whether
    ``max_model_len`` lies beyond the trained context.

    :param max_model_len: the longest sequence that will be requested
    """

    def __init__(self, config: RopeConfig, *, max_model_len: int, device: torch.device) -> None:
        # On the CPU first: a device's own pow may round the frequencies differently.
        self._inverse_frequencies = _inverse_frequencies(config, max_model_len).to(device)
        self._attention_factor = _attention_factor(config)

    def at(self, positions: Tensor) -> Rotation:
        """Compute the cosines and sines at some positions; doing so once per step for all layers costs less than
        reading a table.

        :param positions: ``[num_tokens]`` int64
        """
        angles = positions.float()[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return Rotation(cos[:, None, None], torch.stack((-sin, sin), dim=1)[:, None])


def _inverse_frequencies(config: RopeConfig, max_model_len: int) -> Tensor:
    """Return the frequencies, ``[rotary_dim / 2]`` float32, in radians per token."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    periods = config.theta**exponents
    if config.inv_freq_divisors:
        return 1.0 / (torch.tensor(config.inv_freq_divisors) * periods)
    match config.kind:
        case RopeKind.DEFAULT:
            return 1.0 / periods
        case RopeKind.LINEAR:
            return 1.0 / periods / config.factor
        case RopeKind.LLAMA3:
            return _llama3(config, 1.0 / periods)
        case RopeKind.YARN:
            return _yarn(config, periods)
        case RopeKind.LONGROPE:
            # Ding et al., 2024, arXiv 2402.13753
            is_long = max_model_len > config.original_max_position
            return 1.0 / (torch.tensor(config.long_factor if is_long else config.short_factor) * periods)


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly in between (Llama 3.1's own scheme)."""
    turns = config.original_max_position * inverse / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / config.factor + blend * inverse


def _yarn(config: RopeConfig, periods: Tensor) -> Tensor:
    """Scale as llama3 does, but blend linearly in the index of the frequency (Peng et al., 2023, arXiv 2309.00071)."""

    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency that makes so many turns within the trained context."""
        return (
            config.rotary_dim
            * math.log(config.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low or 0.001  # a step, where both bounds fall on one index
    slow = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return slow / (config.factor * periods) + (1 - slow) / periods


def _attention_factor(config: RopeConfig) -> float:
    """Return the factor for cos and sin that undoes the lower entropy of attention over a longer context."""
    if config.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    if config.kind is RopeKind.LONGROPE:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
    if config.mscale and config.mscale_all_dim:
        return _yarn_mscale(config.factor, config.mscale) / _yarn_mscale(config.factor, config.mscale_all_dim)
    return _yarn_mscale(config.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
