"""Compute rotary position embeddings (Su et al., 2021, arXiv 2104.09864) and their extensions to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.kernels.rotary import Rotation

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding:
    """Holds the rotary frequencies shared by layers with the same RoPE settings.

    LongRoPE has two sets of frequencies: for sequences within the trained context and for longer ones. All keys of a
    sequence are rotated by one set, so the scheduler recomputes them when the sequence outgrows the trained context.
    """

    def __init__(self, config: RopeConfig, *, device: torch.device) -> None:
        # Computed on the CPU: a device's pow may round the frequencies differently.
        self._inverse_frequencies = _inverse_frequencies(config).to(device)
        self._switch = config.switch or 0
        self._long = None if config.switch is None else _inverse_frequencies(config, is_long=True).to(device)
        self._axes = torch.tensor(config.axis_of_frequency, dtype=torch.int64).to(device)
        self._attention_factor = _attention_factor(config) * config.gguf_attn_factor
        self._query_scale = (config.query_scale_beta, config.original_max_position) if config.query_scale_beta else None

    @property
    def turns(self) -> tuple[Tensor, float, float, int] | None:
        """Return the frequencies, ``[rotary_dim / 2]`` float32 in radians per token, the factor of cosines and sines,
        and ``query_scale_beta`` with the length that it counts in, if all follows from a token's own position alone;
        else None.
        """
        if self._long is not None or self._axes.numel():
            return None
        return self._inverse_frequencies, self._attention_factor, *(self._query_scale or (0.0, 1))

    def at(self, positions: Tensor, is_long: Tensor | None = None) -> Rotation:
        """Compute the cosines and sines at the given positions. Doing so once per step for all layers is cheaper than
        reading a table.

        :param positions: ``[num_tokens]`` int64; ``[3, num_tokens]`` for models with three position axes (M-RoPE),
            where each frequency uses one axis
        :param is_long: ``[num_tokens]`` bool: whether each token's sequence is longer than LongRoPE's trained context;
            None: decide by the token's own position
        """
        frequencies = self._inverse_frequencies
        if self._long is not None:
            is_long = positions >= self._switch if is_long is None else is_long
            frequencies = self._long.where(is_long[:, None], frequencies)
        turning = positions[:, None] if positions.dim() == 1 else positions[self._axes].T.contiguous()
        angles = turning.float() * frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cosines, sines = cosines * self._attention_factor, sines * self._attention_factor
        if self._query_scale is None:
            return Rotation(cosines, sines)
        beta, length = self._query_scale
        return Rotation(cosines, sines, 1.0 + beta * torch.log1p((positions // length).float()))


def _inverse_frequencies(config: RopeConfig, *, is_long: bool = False) -> Tensor:
    """Return the frequencies, ``[rotary_dim / 2]`` float32, in radians per token.

    :param is_long: whether to return LongRoPE's set for sequences beyond the trained context
    """
    if not config.rotates:
        return torch.zeros(config.rotary_dim // 2, dtype=torch.float32)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    periods = config.theta**exponents
    if config.inv_freq_divisors:
        periods = torch.tensor(config.inv_freq_divisors, dtype=torch.float32) * periods
    match config.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            # Dynamic scaling only changes sequences beyond the model's context, which are refused.
            return 1.0 / periods
        case RopeKind.LINEAR:
            return 1.0 / periods / config.factor
        case RopeKind.LLAMA3:
            return _llama3(config, 1.0 / periods)
        case RopeKind.YARN:
            return _yarn(config, periods)
        case RopeKind.LONGROPE:
            # Ding et al., 2024, arXiv 2402.13753
            factors = config.long_factor if is_long else config.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly in between (Llama 3.1's own scheme)."""
    turns = config.original_max_position * inverse / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / config.factor + blend * inverse


def _yarn(config: RopeConfig, periods: Tensor) -> Tensor:
    """Scale as llama3 does, but blend linearly in the index of the frequency (Peng et al., 2023, arXiv 2309.00071)."""

    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency that makes ``turns`` turns within the trained context."""
        return (
            config.rotary_dim
            * math.log(config.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low or 0.001  # a step function if both bounds fall on one index
    slow = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return slow / (config.factor * periods) + (1 - slow) / periods


def _attention_factor(config: RopeConfig) -> float:
    """Return the factor on cos and sin that scales attention logits for the longer context (YaRN and LongRoPE)."""
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
