"""Describe rotary embeddings (Su et al., 2021, arXiv 2104.09864)."""

from __future__ import annotations

from enum import Enum
from typing import Final

from attrs import frozen

__all__ = ["NO_ROPE", "RopeConfig", "RopeKind"]


class RopeKind(Enum):
    """Says how rotary frequencies are scaled beyond the context that a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@frozen(kw_only=True)
class RopeConfig:
    """Describes the rotary embedding of one kind of layer, by the names of Hugging Face's ``rope_scaling`` keys.

    :ivar rotary_dim: leading elements of each head that are rotated (even, <= head_dim)
    :ivar theta: base of the frequencies
    :ivar factor: context extension
    :ivar original_max_position: trained context in tokens; required by llama3, yarn and longrope
    :ivar attention_factor: multiplies cos and sin; None: computed from the kind's formula
    :ivar gguf_attn_factor: a further factor on cos and sin, for every kind (GGUF's attn_factor)
    :ivar axis_of_frequency: the position axis of each frequency: 0 time, 1 height, 2 width (M-RoPE: Wang et al., 2024,
        arXiv 2409.12191); empty: tokens have one position
    :ivar short_factor: longrope, one divisor per frequency up to ``original_max_position`` tokens
    :ivar long_factor: longrope, one divisor per frequency beyond that
    :ivar inv_freq_divisors: one divisor per frequency, applied before the kind's formula (GGUF's rope_freqs)
    :ivar interleaved: True: element 2i of a head is paired with element 2i + 1 (glm, cohere); False: element i with
        element i + rotary_dim / 2
    :ivar query_scale_beta: queries at position p are multiplied by ``1 + query_scale_beta * log(1 + floor(p /
        original_max_position))`` (ministral3)
    :ivar rotates: False: nothing is rotated, and the other settings have no effect (:data:`NO_ROPE`)
    """

    rotary_dim: int
    theta: float = 10_000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    gguf_attn_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    inv_freq_divisors: tuple[float, ...] = ()
    interleaved: bool = False
    query_scale_beta: float = 0.0
    rotates: bool = True
    axis_of_frequency: tuple[int, ...] = ()

    @property
    def switch(self) -> int | None:
        """Return the sequence length beyond which all keys use the long frequencies; None if frequencies never
        change.
        """
        switches = self.kind is RopeKind.LONGROPE and self.short_factor != self.long_factor
        return self.original_max_position if switches else None


# One frequency whose angle is always 0: kernels need no special case for no rotation, nor for zero frequencies.
NO_ROPE: Final = RopeConfig(rotary_dim=2, rotates=False)
"""The rotary embedding of layers without positions (NoPE)."""
