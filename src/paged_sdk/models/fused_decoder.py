"""A decoder on the CPU in one native call per step.

On a small model the number of calls decides: a layer of SmolLM2-135M multiplies 3.5 M weights, 40 us from the cache,
and a dozen separate operations around them cost as much again. Between the layers everything is float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.context import StepContext
from paged_sdk.attention.native_paged import NativePagedBackend, NativePagedStep
from paged_sdk.config.decoder import Activation, DecoderConfig
from paged_sdk.kernels.native.decoder import DecoderLayer as NativeLayer
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.packed import PackedLinear

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


class FusedDecoderModel:
    """A :class:`DecoderModel` of packed weights whose layers are one native call.

    :param model: what :func:`why_not_fused` says nothing against
    :param few_rows: tokens of a step beyond which the weights' form for many rows is faster, where they have one
    :ivar config: the model's; ``dtype`` and ``device`` likewise
    """

    def __init__(self, model: DecoderModel, backend: NativePagedBackend, *, few_rows: int) -> None:
        self.config: DecoderConfig = model.config
        self.dtype = model.dtype
        self.device = model.device
        self._model = model
        self._few_rows = few_rows
        self._norm = model.norm.weight.float()
        few = [_native_layer(layer, backend, index) for index, layer in enumerate(model.layers)]
        self._few = NativeDecoder(backend.workspace, few)
        self._many = NativeDecoder(
            backend.workspace, [_for_many_rows(native, layer) for native, layer in zip(few, model.layers, strict=True)]
        )

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """See :meth:`DecoderModel.forward`; the result is float32, before the last norm."""
        assert isinstance(ctx.attention, NativePagedStep)
        hidden = self._model.embedding.forward(token_ids).float()
        rotation = self._model.ropes[self.config.ropes[0]].at(positions)
        decoder = self._few if len(token_ids) <= self._few_rows else self._many
        decoder(hidden, rotation.cosines, rotation.sines, ctx.attention.slots, ctx.attention.batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`DecoderModel.logits`; the last norm is taken here, of the rows that are asked for."""
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._norm, self._model.norm.eps)
        # A head of plain numbers multiplies with its own dtype; the other forms take float32.
        is_dense = isinstance(self._model.head, DenseLinear)
        return self._model.logits(normed.to(self.dtype) if is_dense else normed)


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


def _for_many_rows(native: NativeLayer, layer: DecoderLayer) -> NativeLayer:
    """The same layer with each weight in its form for many rows, where it has one."""
    qkv, output, gate_up, down = ((packed := _packed(linear)).many_rows or packed.weights for linear in layer.linears)
    return evolve(native, qkv=qkv, output=output[0], gate=gate_up[0], up=gate_up[1], down=down[0])


def _packed(linear: object) -> PackedLinear:
    assert isinstance(linear, PackedLinear)
    return linear
