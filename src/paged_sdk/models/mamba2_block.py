"""Compute selective state spaces, which some layers have instead of attention or beside it (Mamba-2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.kernels.drafted_rule import apply_rule
from paged_sdk.kernels.mamba2 import selective_scan
from paged_sdk.kernels.native.recurrent import NativeMamba2, NativeShortConv
from paged_sdk.kernels.recurrent_step import RecurrentRows, RecurrentStep
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.short_conv import short_conv
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["Mamba2Block", "load_mamba2_block"]


class Mamba2Block:
    """Computes a short convolution of inputs, B and C, the selective state space, and a gated norm.

    :param layer: the layer's index, under which the step has its states
    :param input: projects to gates, inputs, B, C and step sizes, in this order
    :param conv: the convolution's weight, ``[channels, kernel_size]``
    :param conv_bias: its bias, ``[channels]``; None: it has none
    :param log_rate: the logarithm of each head's rate of decay, ``[num_heads]`` in at least float32
    :param step_bias: what is added to step sizes, ``[num_heads]`` in at least float32
    :param skip: what multiplies inputs that are added to the output, ``[num_heads]`` in at least float32
    :param norm: weight of the norm of each group of heads, ``[num_heads * head_dim]``; None: no norm
    :ivar native: the native kernels for the CPU; None: they do not have this dtype and these sizes
    """

    def __init__(
        self,
        layer: int,
        config: Mamba2Config,
        *,
        input: Linear,
        output: Linear,
        conv: Tensor,
        conv_bias: Tensor | None,
        log_rate: Tensor,
        step_bias: Tensor,
        skip: Tensor,
        norm: Tensor | None,
        norm_eps: float,
    ) -> None:
        self.input = input
        self.output = output
        self._layer = layer
        self._config = config
        self._conv = conv
        self._conv_bias = conv_bias
        self._rate = log_rate.exp()
        self._step_bias = step_bias
        self._skip = skip
        self._norm = norm
        self._norm_eps = norm_eps
        self._part_scales = _spread(config.part_scales, config.parts, conv) if config.part_scales else None
        self.native: tuple[NativeShortConv, NativeMamba2] | None = self._find_native()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.input, self.output

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Apply the block to the tokens of a step, ``[num_tokens, hidden_size]``. Positions do not matter."""
        config, step = self._config, ctx.attention.recurrent
        projected = self.input.forward(x if config.input_scale == 1.0 else x * config.input_scale, ctx)
        if self._part_scales is not None:
            projected = projected * self._part_scales
        gates, inner, steps = torch.split(projected, [config.width, config.channels, config.num_heads], -1)
        if self.native is not None and step.rows.native is not None:
            conv, scan = self.native
            conv_pool, pool, kept = step.states[self._layer]
            mixed = conv.forward(inner, conv_pool, step.rows.native)
            read = scan.forward(mixed, steps, gates, pool, kept, step.rows.native)
        else:
            read = self._mix(inner, steps, gates, step)
        output = self.output.forward(read, ctx)
        return output if config.output_scale == 1.0 else output * config.output_scale

    def _mix(self, inner: Tensor, steps: Tensor, gates: Tensor, step: RecurrentStep) -> Tensor:
        """Compute what is between the projections with torch operations.

        :param inner: inputs, B and C, ``[num_tokens, channels]``
        :param steps: step sizes before their bias and softplus, ``[num_tokens, num_heads]``
        :param gates: ``[num_tokens, num_heads * head_dim]``
        :returns: like ``gates``
        """
        conv_pool, pool, kept = step.states[self._layer]
        inner = F.silu(short_conv(inner, self._conv, self._conv_bias, conv_pool, step.rows))
        out = apply_rule(self._scan, (inner, steps), pool, kept, step.rows)
        gate = F.silu(gates.to(out.dtype))
        if self._norm is None:
            return (out * gate).to(inner.dtype)
        if self._config.gate_first:
            return self._normed(out * gate).to(inner.dtype)
        return (self._normed(out) * gate).to(inner.dtype)

    def _scan(self, inputs: Sequence[Tensor], pool: Tensor, rows: RecurrentRows) -> Tensor:
        """Take states through tokens, with the skip connection.

        :param inputs: inputs, B and C, ``[num_tokens, channels]``, and step sizes
        :returns: ``[num_tokens, num_heads * head_dim]``
        """
        config, (inner, steps) = self._config, inputs
        x, write, read = torch.split(inner, list(config.parts[1:4]), -1)
        x = torch.unflatten(x, -1, (-1, config.head_dim)).to(self._rate.dtype)
        size = F.softplus(steps.to(self._rate.dtype) + self._step_bias)
        out = selective_scan(
            x,
            torch.unflatten(write, -1, (config.num_groups, -1)),
            torch.unflatten(read, -1, (config.num_groups, -1)),
            size,
            -self._rate * size,
            pool,
            rows,
        )
        return (out + x * self._skip.unsqueeze(-1)).flatten(1)

    def _normed(self, x: Tensor) -> Tensor:
        """Normalize the columns of each group of heads, ``[num_tokens, num_heads * head_dim]``."""
        assert self._norm is not None
        groups = torch.unflatten(x, -1, (self._config.num_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], None, self._norm_eps).flatten(1) * self._norm

    def _find_native(self) -> tuple[NativeShortConv, NativeMamba2] | None:
        """Return the native kernels for the CPU, or None if they do not have this dtype and these sizes."""
        config, conv = self._config, self._conv
        serves = NativeShortConv.serves(conv) and NativeMamba2.serves(conv.dtype, config.head_dim, config.state_size)
        if conv.device.type != "cpu" or not serves:
            return None
        scan = NativeMamba2(
            config.head_dim,
            config.state_size,
            config.num_groups,
            rate=self._rate,
            step_bias=self._step_bias,
            skip=self._skip,
            norm_weight=self._norm,
            norm_eps=self._norm_eps,
            gate_first=config.gate_first,
        )
        return NativeShortConv(conv, self._conv_bias, silu=True), scan


def _spread(scales: tuple[float, ...], parts: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the factor of each column of a projection, of the dtype and on the device of ``like``."""
    spread = torch.repeat_interleave(torch.tensor(scales, dtype=torch.float32), torch.tensor(parts))
    return spread.to(dtype=like.dtype, device=like.device)


def load_mamba2_block(
    loader: WeightLoader, config: DecoderConfig, mamba: Mamba2Config, prefix: str, layer: int
) -> Mamba2Block:
    """Load one layer's selective state space.

    :param prefix: prefix of the block's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    hidden, heads, channels = config.hidden_size, mamba.num_heads, mamba.channels
    log_rate, step_bias, skip = (loader.tensor(f"{prefix}{name}", heads) for name in ("A_log", "dt_bias", "D"))
    wide = torch.promote_types(log_rate.dtype, torch.float32)
    return Mamba2Block(
        layer,
        mamba,
        input=loader.linear(
            [f"{prefix}in_proj"], in_features=hidden, out_features=(sum(mamba.parts),), bias=mamba.input_bias
        ),
        output=loader.linear(
            [f"{prefix}out_proj"], in_features=mamba.width, out_features=(hidden,), bias=mamba.output_bias
        ),
        conv=loader.tensor(f"{prefix}conv1d.weight", channels, 1, mamba.kernel_size).squeeze(1),
        conv_bias=loader.tensor(f"{prefix}conv1d.bias", channels) if mamba.conv_bias else None,
        log_rate=log_rate.to(wide),
        step_bias=step_bias.to(wide),
        skip=skip.to(wide),
        norm=loader.tensor(f"{prefix}norm.weight", mamba.width).to(wide) if mamba.has_norm else None,
        norm_eps=config.norm_eps,
    )
