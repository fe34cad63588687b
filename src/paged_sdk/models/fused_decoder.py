"""A decoder on the CPU in one native call per step.

On a small model the number of calls decides: a layer of SmolLM2-135M multiplies 3.5 M weights, 40 us from the cache,
and a dozen separate operations around them cost as much again. Between the layers everything is float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, NativePages
from paged_sdk.config.decoder import Activation, DecoderConfig
from paged_sdk.kernels.native.decoder import DecoderLayer as NativeLayer
from paged_sdk.kernels.native.decoder import NativeDecoder, Router
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.quant.linear import Linear, NativeWeights

__all__ = ["FusedDecoderModel", "why_not_fused"]


def why_not_fused(model: DecoderModel, backend: AttentionBackend) -> str | None:
    """Why a model's layers cannot be fused, or None if they can."""
    config = model.config
    if backend.native_pages is None:
        return "its attention is not native"
    if any(linear.native_weights is None for layer in model.layers for linear in layer.linears):
        return "its weights have no native kernel"
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    if any(mixture.experts.native_weights is None for mixture in mixtures):
        return "its experts have no native kernel"
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

    def __init__(self, model: DecoderModel, backend: AttentionBackend, *, few_rows: int) -> None:
        pages = backend.native_pages
        assert pages is not None
        self.config: DecoderConfig = model.config
        self.dtype = model.dtype
        self.device = model.device
        self._model = model
        self._few_rows = few_rows
        self._norm = model.norm.weight.float()
        self._few, self._many = (
            NativeDecoder(
                pages.workspace,
                [_native_layer(layer, pages, index, many_rows=many) for index, layer in enumerate(model.layers)],
            )
            for many in (False, True)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """See :meth:`DecoderModel.forward`; the result is float32, before the last norm."""
        rows = ctx.attention.native_rows
        assert rows is not None
        hidden = self._model.embedding.forward(token_ids).float()
        rotation = self._model.ropes[self.config.ropes[0]].at(positions)
        decoder = self._few if len(token_ids) <= self._few_rows else self._many
        decoder(hidden, rotation.cosines, rotation.sines, rows.slots, rows.batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`DecoderModel.logits`; the last norm is taken here, of the rows that are asked for."""
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._norm, self._model.norm.eps)
        # A head without a native kernel multiplies in the model's dtype; the native ones take float32.
        is_native = self._model.head.native_weights is not None
        return self._model.logits(normed if is_native else normed.to(self.dtype))


def _native_layer(layer: DecoderLayer, pages: NativePages, index: int, *, many_rows: bool) -> NativeLayer:
    """One layer, its weights in their form for many rows or for few."""
    attention, mlp, shape = layer.attention, layer.mlp, pages.shapes[index]
    (output,) = _weights(attention.output, many_rows=many_rows)
    query_norm = key_norm = router = None
    if attention.qk_norm is not None:
        # One row for each head, all queries' alike and all keys' alike.
        query_norm, key_norm = attention.qk_norm.weight[[0, shape.num_heads]].float()
    if isinstance(mlp, MoeMlp):
        experts = mlp.experts.native_weights
        assert experts is not None
        gate, up, down = experts.gate, experts.up, experts.down
        router = Router(
            weight=mlp.router.contiguous(),
            num_selected=mlp.config.num_experts_per_token,
            renormalize=mlp.config.renormalize,
        )
    else:
        gate, up = _weights(mlp.gate_up, many_rows=many_rows)
        (down,) = _weights(mlp.down, many_rows=many_rows)
    return NativeLayer(
        shape=shape,
        cache=pages.caches[index],
        qkv=_weights(attention.qkv, many_rows=many_rows),
        qkv_biases=_native(attention.qkv).biases,
        output=output,
        router=router,
        gate=gate,
        up=up,
        down=down,
        attention_norm=layer.attention_norm.weight.float(),
        mlp_norm=layer.mlp_norm.weight.float(),
        query_norm=query_norm,
        key_norm=key_norm,
        norm_eps=layer.attention_norm.eps,
        activation="gelu_tanh" if isinstance(mlp, GatedMlp) and mlp.activation is Activation.GELU_TANH else "silu",
    )


def _weights(linear: Linear, *, many_rows: bool) -> tuple[PackedWeight, ...]:
    """The matrices of a layer in their form for many rows or for few."""
    native = _native(linear)
    return native.many if many_rows else native.few


def _native(linear: Linear) -> NativeWeights:
    native = linear.native_weights
    assert native is not None
    return native
