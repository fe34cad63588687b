"""Compute gated delta networks, linear attention that some layers have instead of softmax attention (Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import GatedDeltaConfig
from paged_sdk.kernels.drafted_rule import apply_rule
from paged_sdk.kernels.gated_delta import gated_delta_rule
from paged_sdk.kernels.native.recurrent import NativeGatedDelta, NativeShortConv
from paged_sdk.kernels.recurrent_step import RecurrentRows, RecurrentStep
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.short_conv import short_conv
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import RMSNorm
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear
from paged_sdk.weights.qkv_order import group_order, qkvz_order

__all__ = ["GatedDeltaBlock", "load_gated_delta_block"]


class GatedDeltaBlock:
    """Computes a short convolution of queries, keys and values, the gated delta rule, and a gated norm.

    :param layer: the layer's index, under which the step has its states
    :param input: projects to queries, keys, values and output gates, in this order
    :param rates: projects to write strengths and decays, one each per head of values
    :param conv: the convolution's weight, ``[channels, kernel_size]``
    :param log_rate: the logarithm of each head's rate of decay, ``[num_value_heads]`` in at least float32
    :param step_bias: what is added to decays, ``[num_value_heads]`` in at least float32
    :param norm: norms each head's output
    :ivar native: the native kernels for the CPU; None: they do not have this dtype and these sizes
    """

    def __init__(
        self,
        layer: int,
        config: GatedDeltaConfig,
        *,
        input: Linear,
        rates: Linear,
        output: Linear,
        conv: Tensor,
        log_rate: Tensor,
        step_bias: Tensor,
        norm: RMSNorm,
    ) -> None:
        self.input = input
        self.rates = rates
        self.output = output
        self._layer = layer
        self._config = config
        self._conv = conv
        self._rate = log_rate.exp()
        self._step_bias = step_bias
        self._norm = norm
        self.native: tuple[NativeShortConv, NativeGatedDelta] | None = self._find_native()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.input, self.rates, self.output

    def forward(self, x: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Apply the block to the tokens of a step, ``[num_tokens, hidden_size]``. Positions do not matter."""
        config, step = self._config, ctx.attention.recurrent
        inner, gates = torch.split(self.input.forward(x, ctx), [config.channels, config.value_width], -1)
        rates = self.rates.forward(x, ctx)
        if self.native is not None and step.rows.native is not None:
            conv, rule = self.native
            conv_pool, pool, kept = step.states[self._layer]
            mixed = conv.forward(inner, conv_pool, step.rows.native)
            return self.output.forward(rule.forward(mixed, rates, gates, pool, kept, step.rows.native), ctx)
        return self.output.forward(self._mix(inner, rates, gates, step), ctx)

    def _mix(self, inner: Tensor, rates: Tensor, gates: Tensor, step: RecurrentStep) -> Tensor:
        """Compute what is between the projections with torch operations.

        :param inner: queries, keys and values, ``[num_tokens, channels]``
        :param rates: write strengths and decays, ``[num_tokens, 2 * num_value_heads]``
        :param gates: ``[num_tokens, value_width]``
        :returns: like ``gates``
        """
        conv_pool, pool, kept = step.states[self._layer]
        inner = F.silu(short_conv(inner, self._conv, None, conv_pool, step.rows))
        read = apply_rule(self._apply, (inner, rates), pool, kept, step.rows)
        gates = torch.unflatten(gates, -1, (-1, self._config.value_dim)).to(self._rate.dtype)
        return (self._norm.forward(read) * F.silu(gates)).to(inner.dtype).flatten(1)

    def _apply(self, inputs: Sequence[Tensor], pool: Tensor, rows: RecurrentRows) -> Tensor:
        """Apply the rule.

        :param inputs: queries, keys and values, ``[num_tokens, channels]``, and rates
        :returns: ``[num_tokens, num_value_heads, value_dim]``
        """
        config, (inner, rates) = self._config, inputs
        strength, decay = rates.chunk(2, -1)
        query, key, value = torch.split(inner, [config.key_width, config.key_width, config.value_width], -1)
        return gated_delta_rule(
            torch.unflatten(query, -1, (-1, config.key_dim)),
            torch.unflatten(key, -1, (-1, config.key_dim)),
            torch.unflatten(value, -1, (-1, config.value_dim)),
            -self._rate * F.softplus(decay.to(self._rate.dtype) + self._step_bias),
            strength.sigmoid(),
            pool,
            rows,
        )

    def _find_native(self) -> tuple[NativeShortConv, NativeGatedDelta] | None:
        """Return the native kernels for the CPU, or None if they do not have this dtype and these sizes."""
        config, conv = self._config, self._conv
        serves = NativeShortConv.serves(conv) and NativeGatedDelta.serves(conv.dtype, config.key_dim, config.value_dim)
        if conv.device.type != "cpu" or not serves:
            return None
        rule = NativeGatedDelta(
            config.num_key_heads,
            config.key_dim,
            rate=self._rate,
            step_bias=self._step_bias,
            norm_weight=self._norm.weight,
            norm_eps=self._norm.eps,
        )
        return NativeShortConv(conv, None, silu=True), rule


def load_gated_delta_block(
    loader: WeightLoader, config: DecoderConfig, delta: GatedDeltaConfig, prefix: str, layer: int
) -> GatedDeltaBlock:
    """Load one layer's gated delta network.

    :param prefix: prefix of the block's tensor names
    :raises CheckpointError: a tensor is missing or has another shape
    """
    hidden, heads = config.hidden_size, delta.num_value_heads
    names = (["qkvz"], ["ba"]) if delta.is_grouped else (["qkv", "z"], ["b", "a"])
    log_rate, step_bias = (loader.tensor(f"{prefix}{name}", heads) for name in ("A_log", "dt_bias"))
    wide = torch.promote_types(log_rate.dtype, torch.float32)
    return GatedDeltaBlock(
        layer,
        delta,
        input=loader.linear(
            [f"{prefix}in_proj_{name}" for name in names[0]],
            in_features=hidden,
            out_features=(delta.channels, delta.value_width),
            order=qkvz_order(delta.num_key_heads, heads, delta.key_dim, delta.value_dim) if delta.is_grouped else None,
        ),
        rates=loader.linear(
            [f"{prefix}in_proj_{name}" for name in names[1]],
            in_features=hidden,
            out_features=(heads, heads),
            order=group_order(delta.num_key_heads, [heads // delta.num_key_heads] * 2) if delta.is_grouped else None,
        ),
        output=loader.linear([f"{prefix}out_proj"], in_features=delta.value_width, out_features=(hidden,)),
        conv=loader.tensor(f"{prefix}conv1d.weight", delta.channels, 1, delta.kernel_size).squeeze(1),
        log_rate=log_rate.to(wide),
        step_bias=step_bias.to(wide),
        norm=RMSNorm(loader.tensor(f"{prefix}norm.weight", delta.value_dim), config.norm_eps),
    )
