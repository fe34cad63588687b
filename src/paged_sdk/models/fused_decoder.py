"""A decoder on the CPU in few native calls: one for a step of few tokens, eleven a layer for a step of many.

On a small model the number of calls decides: a layer of SmolLM2-135M multiplies 3.5 M weights, 40 us from the cache,
and a dozen separate operations around them cost as much again. Between the layers everything is float32.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.context import StepContext
from paged_sdk.attention.native_paged import NativePagedBackend, NativePagedStep
from paged_sdk.config.decoder import Activation, DecoderConfig
from paged_sdk.kernels.native.decoder import DecoderLayer as NativeLayer
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.epilogue import finish_product, place_heads
from paged_sdk.kernels.native.paged_attention import AttentionShape, LayerCache
from paged_sdk.kernels.native.rotation import gated_rotate_quantise, rotate_quantise
from paged_sdk.layers.rotary import Rotation
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.packed import PackedLinear
from paged_sdk.quant.rotated_int8 import RotatedInt8Linear

__all__ = ["FusedDecoderModel", "why_not_fused"]


def why_not_fused(model: DecoderModel, backend: AttentionBackend) -> str | None:
    """Why a model's layers cannot be fused, or None if they can."""
    config = model.config
    if not isinstance(backend, NativePagedBackend):
        return "its attention is not native"
    if config.moe is not None:
        return "its layers have experts"
    if any(not isinstance(linear, PackedLinear) for layer in model.layers for linear in layer.linears):
        return "its weights are not packed"
    if config.sandwich_norms or config.norm_offset or len(set(config.ropes)) > 1:
        return f"{config.model_type} layers have more norms or rotations than the kernel"
    if config.output_bias or config.mlp_bias:
        return "its output or MLP has biases"
    return None


@frozen(eq=False, kw_only=True)
class _ManyRowsLayer:
    """A layer for steps of many tokens: int8 products with native passes between them."""

    qkv: RotatedInt8Linear
    output: RotatedInt8Linear
    gate_up: RotatedInt8Linear
    down: RotatedInt8Linear
    shape: AttentionShape
    cache: LayerCache
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]


class FusedDecoderModel:
    """A :class:`DecoderModel` of packed weights whose layers are few native calls.

    :param model: what :func:`why_not_fused` says nothing against
    :param few_rows: tokens of a step up to which one call over packed weights is faster; where the weights have no
        other form, every step is one call
    :ivar config: the model's; ``dtype`` and ``device`` likewise
    """

    def __init__(self, model: DecoderModel, backend: NativePagedBackend, *, few_rows: int) -> None:
        self.config: DecoderConfig = model.config
        self.dtype = model.dtype
        self.device = model.device
        self._model = model
        self._workspace = backend.workspace
        self._few_rows = few_rows
        self._norm = model.norm.weight.float()
        native = [_native_layer(layer, backend, index) for index, layer in enumerate(model.layers)]
        self._decoder = NativeDecoder(backend.workspace, native)
        self._many = [
            many
            for many in (_many_rows_layer(layer, form) for layer, form in zip(model.layers, native, strict=True))
            if many is not None
        ]

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """See :meth:`DecoderModel.forward`; the result is float32."""
        assert isinstance(ctx.attention, NativePagedStep)
        hidden = self._model.embedding.forward(token_ids).float()
        rotation = self._model.ropes[self.config.ropes[0]].at(positions)
        if self._many and len(token_ids) > self._few_rows:
            self._forward_many(hidden, rotation, ctx.attention)
        else:
            self._decoder(hidden, rotation.cosines, rotation.sines, ctx.attention.slots, ctx.attention.batch)
        return F.rms_norm(hidden, hidden.shape[-1:], self._norm, self._model.norm.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`DecoderModel.logits`."""
        # A head of plain numbers multiplies with its own dtype; the other forms take float32.
        is_dense = isinstance(self._model.head, DenseLinear)
        return self._model.logits(hidden.to(self.dtype) if is_dense else hidden)

    def _forward_many(self, hidden: Tensor, rotation: Rotation, step: NativePagedStep) -> None:
        """All layers, added to ``hidden`` in place."""
        workspace = self._workspace
        cosines, sines = rotation.cosines, rotation.sines
        for index, layer in enumerate(self._many):
            codes, scales = rotate_quantise(
                workspace,
                hidden,
                block=layer.qkv.block,
                norm_weight=layer.attention_norm,
                norm_eps=layer.norm_eps,
            )
            query = place_heads(
                workspace,
                layer.qkv.product(codes),
                scales,
                layer.shape,
                layer.cache,
                cosines=cosines,
                sines=sines,
                slots=step.slots,
                bias=layer.qkv.bias,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                norm_eps=layer.norm_eps,
                dtype=torch.bfloat16,
            )
            attended = step.attend(index, query).flatten(1)
            codes, scales = rotate_quantise(workspace, attended, block=layer.output.block)
            finish_product(workspace, layer.output.product(codes), scales, out=hidden, residual=hidden)
            codes, scales = rotate_quantise(
                workspace, hidden, block=layer.gate_up.block, norm_weight=layer.mlp_norm, norm_eps=layer.norm_eps
            )
            codes, scales = gated_rotate_quantise(
                workspace,
                layer.gate_up.product(codes),
                scales,
                block=layer.down.block,
                activation=layer.activation,
            )
            finish_product(workspace, layer.down.product(codes), scales, out=hidden, residual=hidden)


def _native_layer(layer: DecoderLayer, backend: NativePagedBackend, index: int) -> NativeLayer:
    assert isinstance(layer.mlp, GatedMlp)
    qkv, output, gate_up, down = (_packed(linear) for linear in layer.linears)
    gate, up = gate_up.weights
    shape = backend.shapes[index]
    query_norm = key_norm = None
    if layer.attention.qk_norm is not None:
        # One row for each head, all queries' alike and all keys' alike.
        query_norm, key_norm = layer.attention.qk_norm.weight[[0, shape.num_heads]].float()
    return NativeLayer(
        shape=shape,
        cache=backend.caches[index],
        qkv=qkv.weights,
        qkv_biases=qkv.biases,
        output=output.weights[0],
        gate=gate,
        up=up,
        down=down.weights[0],
        attention_norm=layer.attention_norm.weight.float(),
        mlp_norm=layer.mlp_norm.weight.float(),
        query_norm=query_norm,
        key_norm=key_norm,
        norm_eps=layer.attention_norm.eps,
        activation="silu" if layer.mlp.activation is Activation.SILU else "gelu_tanh",
    )


def _many_rows_layer(layer: DecoderLayer, native: NativeLayer) -> _ManyRowsLayer | None:
    """None: the weights have one form only."""
    forms = [_packed(linear).many_rows for linear in layer.linears]
    if not all(isinstance(form, RotatedInt8Linear) for form in forms):
        return None
    qkv, output, gate_up, down = (form for form in forms if isinstance(form, RotatedInt8Linear))
    return _ManyRowsLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        shape=native.shape,
        cache=native.cache,
        attention_norm=native.attention_norm,
        mlp_norm=native.mlp_norm,
        query_norm=native.query_norm,
        key_norm=native.key_norm,
        norm_eps=native.norm_eps,
        activation=native.activation,
    )


def _packed(linear: object) -> PackedLinear:
    assert isinstance(linear, PackedLinear)
    return linear
