"""Describe layers that keep a state of fixed size per sequence, where attention keeps keys and values per token."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

__all__ = ["GatedDeltaConfig", "Mamba2Config", "RecurrentConfig", "ShortConvConfig", "StateShape"]


@frozen
class StateShape:
    """Describes one tensor of a layer's state of one sequence.

    :ivar shape: its dimensions
    :ivar in_float32: whether it is at least float32, because every token adds to it; False: it has the model's dtype
    :ivar of_drafts: whether only drafts fill it
    """

    shape: tuple[int, ...]
    in_float32: bool = False
    of_drafts: bool = False


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

    def states(self, num_drafts: int) -> tuple[StateShape, ...]:
        """Return the state: the convolution's last inputs, with those of drafts.

        :param num_drafts: most drafts of a sequence per step
        """
        return (StateShape((self.kernel_size - 1 + num_drafts, self.channels)),)


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

    def states(self, num_drafts: int) -> tuple[StateShape, ...]:
        """Return the state: the convolution's last inputs, with those of drafts; a matrix for each head of values; and
        what the rule reads of drafts.

        :param num_drafts: most drafts of a sequence per step
        """
        return (
            StateShape((self.kernel_size - 1 + num_drafts, self.channels)),
            StateShape((self.num_value_heads, self.key_dim, self.value_dim), in_float32=True),
            StateShape((num_drafts, self.channels + 2 * self.num_value_heads), in_float32=True, of_drafts=True),
        )


@frozen(kw_only=True)
class Mamba2Config:
    """Describes a selective state space (Mamba-2: Dao and Gu, 2024, arXiv 2405.21060) after a short convolution of its
    inputs.

    :ivar num_heads: number of heads of the state and of the output
    :ivar head_dim: size of a head's input and output
    :ivar state_size: size of the vectors B, by which inputs are written to a head's state, and C, by which it is read
    :ivar num_groups: number of groups of heads with the same B and C, and of columns that are normalized together
    :ivar kernel_size: tokens that the convolution spans
    :ivar conv_bias: whether the convolution has a bias
    :ivar input_bias: whether the projection to gates, inputs, B, C and steps has a bias
    :ivar output_bias: whether the output projection has a bias
    :ivar has_norm: whether the output is normalized, beside its gates
    :ivar gate_first: True: the gated output is normalized; False: the gates multiply the normalized output
    :ivar input_scale: multiplies the layer's input (falcon_h1)
    :ivar part_scales: multiply gates, inputs, B, C and steps, after their projection (falcon_h1); empty: nothing does
    :ivar output_scale: multiplies the layer's output (falcon_h1)
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    has_norm: bool = True
    gate_first: bool = True
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = ()
    output_scale: float = 1.0

    @property
    def width(self) -> int:
        """Return the width of all heads' inputs, gates and outputs."""
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Return the widths of gates, inputs, B, C and steps, as projections have them."""
        size = self.num_groups * self.state_size
        return self.width, self.width, size, size, self.num_heads

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: inputs, B and C."""
        return sum(self.parts[1:4])

    def states(self, num_drafts: int) -> tuple[StateShape, ...]:
        """Return the state: the convolution's last inputs, with those of drafts; a matrix for each head; and what the
        state space reads of drafts.

        :param num_drafts: most drafts of a sequence per step
        """
        return (
            StateShape((self.kernel_size - 1 + num_drafts, self.channels)),
            StateShape((self.num_heads, self.state_size, self.head_dim), in_float32=True),
            StateShape((num_drafts, self.channels + self.num_heads), in_float32=True, of_drafts=True),
        )


RecurrentConfig: TypeAlias = ShortConvConfig | GatedDeltaConfig | Mamba2Config
