"""Describe layers that keep a state of fixed size per sequence, where attention keeps keys and values per token."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

__all__ = ["GatedDeltaConfig", "RecurrentConfig", "ShortConvConfig", "StateShape"]


@frozen
class StateShape:
    """Describes one tensor of a layer's state of one sequence.

    :ivar shape: its dimensions
    :ivar in_float32: whether it is at least float32, because every token adds to it; False: it has the model's dtype
    """

    shape: tuple[int, ...]
    in_float32: bool = False


@frozen(kw_only=True)
class ShortConvConfig:
    """Describes a gated short convolution (LFM2): ``out(c * conv(b * x))``, where b, c and x are projections of the
    input and the convolution is causal and of each channel alone.

    :ivar channels: number of channels
    :ivar kernel_size: tokens that an output depends on, its own included
    :ivar bias: whether the projections and the convolution have biases
    """

    channels: int
    kernel_size: int
    bias: bool = False

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Return the state: the convolution's last inputs."""
        return (StateShape((self.kernel_size - 1, self.channels)),)


@frozen(kw_only=True)
class GatedDeltaConfig:
    """Describes linear attention by the gated delta rule (Yang et al., 2024, arXiv 2412.06464) after a short
    convolution of queries, keys and values (Qwen3-Next).

    :ivar num_key_heads: number of heads of queries and of keys; each serves several heads of values
    :ivar num_value_heads: number of heads of values, of the state and of the output
    :ivar key_dim: size of a query or key; ``value_dim`` likewise
    :ivar kernel_size: tokens that the convolution spans
    :ivar is_grouped: whether a checkpoint has one projection to queries, keys, values and output gates, and one to
        write strengths and decays, each in groups of rows per key head (qwen3_next); False: a projection to queries,
        keys and values, and one for each of the others
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    is_grouped: bool = False

    @property
    def key_width(self) -> int:
        """Return the width of all queries, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the width of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Return the state: the convolution's last inputs, and a matrix for each head of values."""
        return (
            StateShape((self.kernel_size - 1, self.channels)),
            StateShape((self.num_value_heads, self.key_dim, self.value_dim), in_float32=True),
        )


RecurrentConfig: TypeAlias = ShortConvConfig | GatedDeltaConfig
