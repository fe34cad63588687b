"""Describe a decoder's layer to the native library."""

from __future__ import annotations

from typing import Final, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.attention.backend import NativePages
from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import AttentionGate, DecoderConfig, NormKind, QkNormWeights
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native.decoder_layer import DecoderLayer as NativeLayer
from paged_sdk.kernels.native.decoder_layer import LayerInput
from paged_sdk.kernels.native.latent_attention import LatentAttention
from paged_sdk.kernels.native.mixture import Mixture
from paged_sdk.kernels.native.paged_attention import AttentionShape
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.recurrent import NativeShortConv
from paged_sdk.kernels.native.recurrent_layer import RecurrentMixing
from paged_sdk.kernels.native.routing import ExpertChoice
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.layers.norm import LayerNorm, NoNorm, Norm
from paged_sdk.layers.xielu import Xielu
from paged_sdk.models.attention_block import AttentionBlock
from paged_sdk.models.beside_block import RecurrentBlock
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.gated_delta_block import GatedDeltaBlock
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.models.latent_attention_block import LatentAttentionBlock
from paged_sdk.models.mamba2_block import Mamba2Block
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.models.norms import SharedWholeNorms, WholeNorms
from paged_sdk.models.plain_mlp import PlainMlp
from paged_sdk.models.sharded import ColumnParallelExperts, ColumnParallelLinear
from paged_sdk.models.short_conv_block import ShortConvBlock
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.latent_heads import NativeLatentHeads
from paged_sdk.quant.linear import Linear

__all__ = ["native_layer", "norm_weights"]

_HEAD_NORMS: Final[dict[QkNormWeights, Literal["shared", "own", "whole"]]] = {
    QkNormWeights.SHARED: "shared",
    QkNormWeights.OWN: "own",
    QkNormWeights.WHOLE: "whole",
}

_COLUMN_PARALLEL: Final = (ColumnParallelLinear, ColumnParallelExperts)
_GATES: Final[dict[AttentionGate, Literal["apart", "with queries"]]] = {
    AttentionGate.APART: "apart",
    AttentionGate.WITH_QUERIES: "with queries",
}


def native_layer(
    layer: DecoderLayer,
    config: DecoderConfig,
    pages: NativePages,
    index: int,
    *,
    number: int,
    rope: int,
    eps: float,
    dtype: torch.dtype,
    many_rows: bool,
) -> NativeLayer:
    """Describe one layer to the native library, with its weights in the form for many rows or for few.

    :param layer: a layer that :func:`~paged_sdk.models.fusible.why_not_fused` does not refuse
    :param index: the layer's place among the pages
    :param number: its number in the model
    :param rope: the number of its rotary embedding
    :param eps: epsilon of its norms
    :param dtype: the model's
    """
    mixer, own = _mixer(layer, config, pages, index, dtype=dtype, many_rows=many_rows), config.layer(number)
    gate, up, down = _mlp(layer, many_rows=many_rows)
    attention_norm, attention_norm_bias = norm_weights(layer.attention_norm)
    # A layer of an MLP alone has one norm, before it.
    mlp_norm, mlp_norm_bias = norm_weights(layer.attention_norm if layer.mixer is None else layer.mlp_norm)
    mlp = layer.common_mlp
    attended = mixer.output if isinstance(mixer.output, ColumnParallelLinear) else None
    inner = mlp.down if mlp is not None and isinstance(mlp.down, ColumnParallelLinear) else None
    experts = layer.mlp.experts if isinstance(layer.mlp, MoeMlp) else None
    joined = next((each for each in (attended, inner, experts) if isinstance(each, _COLUMN_PARALLEL)), None)
    activation = Activation.SILU if mlp is None else mlp.activation
    return NativeLayer(
        shape=mixer.shape,
        cache=mixer.cache,
        qkv=mixer.qkv,
        latent=mixer.latent,
        recurrent=mixer.recurrent,
        output=None if mixer.output is None else _projections(mixer.output, many_rows=many_rows)[0],
        gate=gate,
        up=up,
        down=down,
        mixture=_mixture(layer),
        norm="layer" if config.norm is NormKind.LAYER else "rms",
        attention_norm=attention_norm,
        attention_norm_bias=attention_norm_bias,
        attention_output_norm=norm_weights(layer.attention_output_norm)[0],
        mlp_norm=mlp_norm,
        mlp_norm_bias=mlp_norm_bias,
        mlp_output_norm=norm_weights(layer.mlp_output_norm)[0],
        head_norm=_HEAD_NORMS[config.qk_norm_weights],
        query_norm=mixer.query_norm[0],
        query_norm_bias=mixer.query_norm[1],
        key_norm=mixer.key_norm[0],
        key_norm_bias=mixer.key_norm[1],
        norms_last=config.qk_norm_after_rope,
        gates=mixer.gates,
        value_norm=mixer.norms_values,
        keys_as_values=own.keys_as_values,
        shares_keys=not own.keeps_kv,
        layer_input=_layer_input(layer, config, number, many_rows=many_rows),
        scale=1.0 if layer.scale is None else float(layer.scale),
        norm_eps=eps,
        clip=config.qkv_clip,
        sinks=mixer.sinks,
        parallel=config.parallel_residual,
        activation="silu" if isinstance(activation, Xielu) else KERNEL_ACTIVATIONS[activation],
        xielu=activation.numbers if isinstance(activation, Xielu) else None,
        rope=rope,
        attended_widths=None if attended is None else attended.inputs,
        inner_widths=None if inner is None else inner.inputs,
        hidden_widths=None if joined is None else joined.outputs,
    )


@frozen(eq=False, kw_only=True)
class _Mixer:
    """Holds what differs between kinds of attention, and what other layers have in its place.

    :ivar query_norm: weight and bias of the norm of queries; ``key_norm`` likewise
    """

    qkv: tuple[Projection, ...] = ()
    output: Linear | None = None
    shape: AttentionShape | None = None
    cache: LayerCache | None = None
    recurrent: RecurrentMixing | None = None
    gates: Literal["apart", "with queries"] | None = None
    latent: LatentAttention | None = None
    query_norm: tuple[Tensor | None, Tensor | None] = (None, None)
    key_norm: tuple[Tensor | None, Tensor | None] = (None, None)
    norms_values: bool = False
    sinks: Tensor | None = None


def _mixer(
    layer: DecoderLayer, config: DecoderConfig, pages: NativePages, index: int, *, dtype: torch.dtype, many_rows: bool
) -> _Mixer:
    match layer.mixer:
        case None:
            return _Mixer()
        case ShortConvBlock() | GatedDeltaBlock() | Mamba2Block() as block:
            return _recurrent(block, pages.states[index], many_rows=many_rows)
        case LatentAttentionBlock() as block:
            attention = _latent_attention(block, config, dtype, many_rows=many_rows)
        case _:
            attention = _attention(layer.attention, config, many_rows=many_rows)
    cache, shape = pages.attention(index)
    return evolve(attention, cache=cache, shape=shape)


def _recurrent(block: RecurrentBlock, states: tuple[Tensor, ...], *, many_rows: bool) -> _Mixer:
    assert block.native is not None, "why_not_fused() refuses others"
    conv, rule = (block.native, None) if isinstance(block.native, NativeShortConv) else block.native
    rates = _projections(block.rates, many_rows=many_rows) if isinstance(block, GatedDeltaBlock) else ()
    return _Mixer(
        qkv=_projections(block.input, many_rows=many_rows),
        output=block.output,
        recurrent=RecurrentMixing(conv=conv, rule=rule, rates=rates, states=states),
    )


def _attention(attention: AttentionBlock, config: DecoderConfig, *, many_rows: bool) -> _Mixer:
    assert not isinstance(attention.qk_norm, SharedWholeNorms), "why_not_fused() refuses norms across ranks"
    query, key = _head_norms(attention.qk_norm, config)
    return _Mixer(
        gates=None if config.attention_gate is None else _GATES[config.attention_gate],
        qkv=_projections(attention.qkv, many_rows=many_rows),
        output=attention.output,
        query_norm=query,
        key_norm=key,
        norms_values=attention.value_norm is not None,
        sinks=attention.sinks,
    )


def _latent_attention(
    attention: LatentAttentionBlock, config: DecoderConfig, dtype: torch.dtype, *, many_rows: bool
) -> _Mixer:
    shape, heads = config.latent, attention.heads
    assert shape is not None
    assert isinstance(heads, NativeLatentHeads), "why_not_fused() refuses others"
    (down,) = _projections(attention.latent, many_rows=many_rows)
    up = () if attention.query_up is None else _projections(attention.query_up, many_rows=many_rows)
    norm = norm_weights(attention.latent_norm)[0]
    assert norm is not None
    return _Mixer(
        qkv=_projections(attention.query, many_rows=many_rows),
        output=attention.output,
        latent=LatentAttention(
            down=down,
            query_up=next(iter(up), None),
            heads=heads.packed,
            query_norm=norm_weights(attention.query_norm)[0],
            norm=norm,
            norm_eps=shape.norm_eps,
            rope_dim=shape.rope_dim,
            dtype=dtype,
        ),
    )


def _mlp(layer: DecoderLayer, *, many_rows: bool) -> tuple[Projection | None, Projection | None, Projection | None]:
    """Return gate, up and down of the MLP that all tokens use; None for those that it lacks."""
    mlp = layer.common_mlp
    if mlp is None:
        return None, None, None
    (down,) = _projections(mlp.down, many_rows=many_rows)
    match mlp:
        case PlainMlp():
            (up,) = _projections(mlp.up, many_rows=many_rows)
            return None, up, down
        case GatedMlp():
            gate, up = _projections(mlp.gate_up, many_rows=many_rows)
            return gate, up, down


def _mixture(layer: DecoderLayer) -> Mixture | None:
    """Describe a layer's experts, in place of its MLP or beside it; None if it has none."""
    if isinstance(mlp := layer.mlp, MoeMlp):
        gate = None if mlp.shared is None or mlp.shared.gate is None else mlp.shared.gate.flatten()
        return _experts(mlp.experts, mlp.router, mlp.chooser.native, router_bias=mlp.router_bias, mlp_gate=gate)
    if (branch := layer.expert_branch) is not None:
        return _experts(
            branch.experts,
            branch.router,
            branch.chooser.native,
            router_norm=norm_weights(branch.router_norm)[0],
            input_norm=norm_weights(branch.input_norm)[0],
            output_norm=norm_weights(branch.output_norm)[0],
            dense_output_norm=norm_weights(branch.dense_output_norm)[0],
        )
    return None


def _experts(experts: Experts, router: Tensor, choice: ExpertChoice, **others: Tensor | None) -> Mixture:
    """Describe experts.

    :param others: vectors of :class:`~paged_sdk.kernels.native.mixture.Mixture` by name
    """
    native = experts.native_weights
    assert native is not None, "why_not_fused() refuses experts without a native kernel"
    extras = native.extras
    biases = (None,) * 3 if extras is None else (extras.gate_bias, extras.up_bias, extras.down_bias)
    gate, up, down = (
        None if weight is None else Projection(weight, None if bias is None else bias.flatten())
        for weight, bias in zip((native.gate, native.up, native.down), biases, strict=True)
    )
    assert up is not None
    assert down is not None
    return Mixture(
        router=router.contiguous(),
        choice=choice,
        gate=gate,
        up=up,
        down=down,
        activation=native.activation,
        swiglu=None if extras is None else (extras.alpha, extras.limit),
        inner_widths=experts.inputs if isinstance(experts, ColumnParallelExperts) else None,
        **others,
    )


def _layer_input(layer: DecoderLayer, config: DecoderConfig, number: int, *, many_rows: bool) -> LayerInput | None:
    own = layer.layer_input
    if own is None or config.layer_inputs is None:
        return None
    (gate,), (output,) = (_projections(each, many_rows=many_rows) for each in (own.gate, own.output))
    norm = norm_weights(own.norm)[0]
    assert norm is not None
    return LayerInput(gate=gate, output=output, norm=norm, column=number * config.layer_inputs.size)


def norm_weights(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a norm's weight and bias in float32; None for those that it lacks."""
    if norm is None or isinstance(norm, NoNorm):
        return None, None
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return norm.weight.float(), None if bias is None else bias.float()


def _head_norms(
    norm: Norm | WholeNorms | None, config: DecoderConfig
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """Return weight and bias of the norm of queries, and of the norm of keys."""
    if isinstance(norm, WholeNorms):
        return norm_weights(norm.query), norm_weights(norm.key)
    weight, bias = norm_weights(norm)
    if weight is None:
        return (None, None), (None, None)
    # The weight has a row per head.
    query, key = weight[: config.num_heads], weight[config.num_heads :]
    if config.qk_norm_weights is QkNormWeights.OWN:
        return (query.flatten(), None), (key.flatten(), None)
    of_keys = key[0] if len(key) else None  # none in layers that attend over another layer's keys
    return (query[0], None if bias is None else bias[0]), (of_keys, None if bias is None else bias[-1])


def _projections(linear: Linear, *, many_rows: bool) -> tuple[Projection, ...]:
    """Return the matrices of a linear layer in the form for many rows or for few, with their biases."""
    native = linear.native_weights
    assert native is not None
    matrices = native.many if many_rows else native.few
    return tuple(Projection(matrix, bias) for matrix, bias in zip(matrices, native.biases, strict=True))
