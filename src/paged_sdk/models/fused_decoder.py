"""Run a decoder on the CPU in one native call per step.

For small models, the number of calls matters: the products of a layer of SmolLM2-135M, 3.5 M weights, take 40 us from
the cache, and a dozen separate operations around them as much again. Activations between layers are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, NativePages
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.native.argmax import likeliest_tokens
from paged_sdk.kernels.native.decoder import EmbeddingTable, NativeDecoder, Turns
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import undefined
from paged_sdk.kernels.native.lora import NativeAdapters, NativeLora
from paged_sdk.kernels.native.norm import NativeNorm
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.layers.norm import LayerNorm, Norm
from paged_sdk.models.attention_block import AttentionBlock
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.fused_head import fused_head
from paged_sdk.models.gated_delta_block import GatedDeltaBlock
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.models.latent_attention_block import LatentAttentionBlock
from paged_sdk.models.mamba2_block import Mamba2Block
from paged_sdk.models.native_layer import native_layer, norm_weights
from paged_sdk.models.plain_mlp import PlainMlp
from paged_sdk.models.rank_head import RankHead
from paged_sdk.models.short_conv_block import ShortConvBlock
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import FEW_ROWS

__all__ = ["FusedDecoderModel", "FusedLayers", "fused_spans", "native_projections", "norm_in_float32"]


class FusedLayers:
    """Runs consecutive layers in one native call.

    If weights have two forms, prompt tokens are multiplied by the form for many rows, and generated tokens by the form
    for few. So outputs do not depend on chunking, on prefix cache hits, or on the other rows of a step, while at most
    ``few_rows`` sequences decode at a time. Prompts with latent attention are an exception: they attend over
    decompressed keys or not by the number of their tokens in a step.

    :param model: a model for whose ``layers`` :func:`~paged_sdk.models.fusible.why_not_fused` returns None
    :param pages: the KV cache of these layers
    :param embeds: whether :meth:`run` may be given token ids in place of their embeddings
    :param few_rows: the number of decoding sequences beyond which generated tokens use the form for many rows too,
        which is then much faster
    :ivar layers: the numbers of the layers
    :ivar stream_scale: factor of the residual stream before the layers; None: 1
    :ivar norm_eps: epsilon of the norms of the scaled residual stream
    :ivar workspace: workspace of the native calls
    :ivar takes_positions: whether :meth:`run` may be given positions in place of rotary embeddings
    :ivar takes_token_ids: whether :meth:`run` may be given token ids
    """

    def __init__(
        self,
        model: DecoderModel,
        pages: NativePages,
        layers: range,
        *,
        few_rows: int = FEW_ROWS,
        embeds: bool = False,
    ) -> None:
        self.layers = layers
        self._group = model.group
        self._few_rows = few_rows
        # With a residual_scale, the residual stream is kept divided by it, so that branches are added unscaled. RMS
        # norms do not depend on the stream's scale, except for epsilon, which is scaled alike.
        scale = model.config.residual_scale
        self.stream_scale: float | None = None if scale is None else 1 / scale
        self.workspace: Workspace = pages.workspace
        self.norm_eps: float = model.config.norm_eps * (self.stream_scale or 1.0) ** 2
        used = {model.config.ropes[layer] for layer in layers}
        ropes = {settings: rope for settings, rope in model.ropes.items() if settings in used}
        self._ropes = [number for number, settings in enumerate(model.ropes) if settings in used]
        known = [Turns(*rope.turns) for rope in ropes.values() if rope.turns is not None]
        self.takes_positions: bool = len(known) == len(ropes)
        table = self._table(model) if embeds else None
        self.takes_token_ids: bool = table is not None
        own = model.layers[layers.start : layers.stop]

        def decoder(*, many_rows: bool) -> NativeDecoder:
            described = [
                native_layer(
                    layer,
                    model.config,
                    pages,
                    place,
                    number=layers[place],
                    rope=list(ropes).index(model.config.ropes[layers[place]]),
                    eps=self.norm_eps,
                    dtype=model.dtype,
                    many_rows=many_rows,
                )
                for place, layer in enumerate(own)
            ]
            return NativeDecoder(
                pages.workspace,
                described,
                interleaved=[each.interleaved for each in ropes],
                shared=None if model.group is None else model.group.shared,
                turns=known if self.takes_positions else (),
                embedding=table,
            )

        self._few = decoder(many_rows=False)
        self._many = decoder(many_rows=True) if any(map(_has_two_forms, own)) else self._few

    def _table(self, model: DecoderModel) -> EmbeddingTable | None:
        """Return the embeddings with which the residual stream begins, if these are all that it begins with."""
        weight = model.embedding.native_weight
        if weight is None or model.layer_inputs is not None:
            return None
        return EmbeddingTable(weight, scale=model.embedding.scale, stream_scale=self.stream_scale or 1.0)

    def run(
        self,
        hidden: Tensor,
        rotations: Sequence[Rotation] | Tensor,
        ctx: StepContext,
        *,
        token_ids: Tensor | None = None,
        reads_all: bool = False,
    ) -> None:
        """Run the layers over the tokens of a step.

        :param hidden: the residual stream, float32 ``[num_tokens, hidden_size]``, times :attr:`stream_scale`;
            overwritten
        :param rotations: all of the model's rotary embeddings at the tokens' positions, or these positions,
            ``[num_tokens]`` int64 (:attr:`takes_positions`)
        :param token_ids: ``[num_tokens]`` int64, with whose embeddings the residual stream begins
            (:attr:`takes_token_ids`); None: with ``hidden``
        :param reads_all: whether all rows of the result are needed; False: rows of tokens whose logits the step does
            not ask for are left as before the last layer, which only computes their keys and values
        """
        rows = ctx.attention.native_rows
        assert rows is not None
        if reads_all and rows.cu_seqlens_read is not None:
            rows = evolve(rows, cu_seqlens_read=None)
        ropes = rotations if isinstance(rotations, Tensor) else [rotations[number].tensors for number in self._ropes]
        adapters = _native_adapters(ctx.adapted, self.layers)
        inputs = None if ctx.layer_inputs is None else ctx.layer_inputs.flatten(1).float().contiguous()
        later = None if ctx.inserted is None or not ctx.inserted.later else ctx.inserted
        if self._few is self._many or not rows.use_few(self._few_rows):
            self._run(self._many, hidden, ropes, rows, adapters, later, inputs, token_ids)
        elif rows.batch.in_chunks is None:
            self._run(self._few, hidden, ropes, rows, adapters, later, inputs, token_ids)
        else:
            for decoder, (tokens, part) in zip((self._many, self._few), rows.parts(), strict=True):
                hidden[tokens] = self._run(
                    decoder,
                    hidden[tokens],
                    ropes[tokens] if isinstance(ropes, Tensor) else [tuple(t[tokens] for t in each) for each in ropes],
                    part,
                    None if adapters is None else NativeAdapters(adapters.loras, adapters.numbers[tokens]),
                    None if later is None else later.part(tokens),
                    None if inputs is None else inputs[tokens],
                    None if token_ids is None else token_ids[tokens],
                )
        if self._group is not None:
            self._group.check_shared()

    def _run(
        self,
        decoder: NativeDecoder,
        hidden: Tensor,
        ropes: Sequence[tuple[Tensor, ...]] | Tensor,
        rows: NativeRows,
        adapters: NativeAdapters | None,
        later: InsertedRows | None,
        inputs: Tensor | None,
        token_ids: Tensor | None,
    ) -> Tensor:
        """Run the layers over some of a step's tokens: in one call, after separate calls for the layers that are
        followed by an addition of image vectors.
        """
        call = partial(
            decoder, hidden, ropes, rows.slots, rows.batch, layer_inputs=inputs, states=rows.states, adapters=adapters
        )
        first = 0
        if later is not None:
            assert self.stream_scale is None, "the vectors would have to be scaled"
            assert token_ids is None, "image vectors are in place of embeddings, too"
            for index in range(self.layers.start, min(self.layers.stop, len(later.later))):
                call(layers=range(first, first + 1))
                later.add_to(hidden, index)
                first += 1
        rest = range(first, len(self.layers))
        if not rest:
            return hidden
        return call(cu_seqlens_read=rows.cu_seqlens_read, layers=rest, token_ids=token_ids)


@runtime_checkable
class RunsFused(Protocol):
    """Describes a model that runs some of its layers in native calls."""

    @property
    def fused_spans(self) -> tuple[range, ...]:
        """Return the layers of each native call."""
        ...


class FusedDecoderModel:
    """Computes the same as a :class:`DecoderModel`, with all layers in one native call: see :class:`FusedLayers`.

    :param model: a model for which :func:`~paged_sdk.models.fusible.why_not_fused` returns None
    :param few_rows: see :class:`FusedLayers`
    :ivar config: the model's config; ``dtype``, ``device`` and ``rank_head`` likewise
    """

    def __init__(self, model: DecoderModel, backend: AttentionBackend, *, few_rows: int = FEW_ROWS) -> None:
        pages = backend.native_pages
        assert pages is not None
        self.config: DecoderConfig = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.rank_head: RankHead | None = model.rank_head
        self._model = model
        self._layers = FusedLayers(model, pages, range(model.config.num_layers), few_rows=few_rows, embeds=True)
        self._norm = norm_in_float32(model.norm, pages.workspace, self._layers.norm_eps)
        self._head = fused_head(model, pages.workspace, norm_eps=self._layers.norm_eps, few_rows=few_rows)

    @property
    def fused_spans(self) -> tuple[range, ...]:
        """Return the layers of each native call."""
        return (self._layers.layers,)

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers like :meth:`DecoderModel.forward`, but return float32 before the last norm; rows of tokens
        whose logits the step does not ask for are as before the last layer.
        """
        if self._layers.takes_token_ids and ctx.inserted is None and not _adapts_embeddings(ctx.adapted):
            hidden = undefined((token_ids.shape[0], self.config.hidden_size))
            self._layers.run(hidden, self._rotations(positions, ctx), ctx, token_ids=token_ids)
            return hidden
        # The same numbers as native calls begin with: a row's must not depend on the other rows of its step.
        hidden = self._model.looked_up(token_ids, ctx, in_float32=True)
        if ctx.inserted is not None:
            ctx.inserted.put_into(hidden)
        if self._model.layer_inputs is not None:
            ctx = self._model.with_layer_inputs(token_ids, hidden.to(self.dtype), ctx)
        return self.forward_embedded(hidden, positions, ctx)

    def forward_embedded(self, embedded: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers like :meth:`forward`.

        :param embedded: the input of the first layer, float32 ``[num_tokens, hidden_size]``; overwritten by the result
        """
        if self._layers.stream_scale is not None:
            embedded *= self._layers.stream_scale
        self._layers.run(embedded, self._rotations(positions, ctx), ctx)
        return embedded

    def _rotations(self, positions: Tensor, ctx: StepContext) -> Tensor | Sequence[Rotation]:
        if self._layers.takes_positions:
            return positions
        return [rope.at(positions, ctx.is_long) for rope in self._model.ropes.values()]

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to rows of :meth:`forward`'s result."""
        return self._norm.forward(hidden)

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits like :meth:`DecoderModel.logits`, after the last norm, which :meth:`forward` leaves out."""
        if self._head is not None and adapted is None:
            return self._head.logits(hidden)
        return self._model.logits(self.normed(hidden), adapted)

    def likeliest(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Implement :meth:`~paged_sdk.models.causal_model.GreedyModel.likeliest`."""
        if self._head is not None and adapted is None:
            return self._head.likeliest(hidden)
        return likeliest_tokens(self._layers.workspace.library, self.logits(hidden, adapted))


def norm_in_float32(norm: Norm, workspace: Workspace, eps: float) -> NativeNorm:
    """Return a norm for the float32 residual stream of fused layers."""
    weight, bias = norm_weights(norm)
    assert weight is not None
    kind: Literal["rms", "layer"] = "layer" if isinstance(norm, LayerNorm) else "rms"
    return NativeNorm(workspace, weight, bias=bias, eps=eps, kind=kind)


def _adapts_embeddings(adapted: AdaptedRows | None) -> bool:
    return adapted is not None and any(lora.embedding is not None for lora in adapted.loras)


def _native_adapters(adapted: AdaptedRows | None, layers: range) -> NativeAdapters | None:
    """Return a step's adapters in their native form for one span of fused layers."""
    if adapted is None:
        return None
    natives = [lora.native.get(layers) for lora in adapted.loras]
    loras = [each for each in natives if isinstance(each, NativeLora)]
    assert len(loras) == len(adapted.loras), "an adapter was not made for the fused layers"
    return NativeAdapters(loras, adapted.numbers)


def fused_spans(model: object) -> tuple[range, ...]:
    """Return the spans of layers that a model computes in native calls; empty if it has none."""
    return model.fused_spans if isinstance(model, RunsFused) else ()


def native_projections(model: DecoderModel) -> list[dict[int, str]]:
    """Return, for each layer, the names of the linear layers that adapters may change, by the native decoder's number
    of their first matrix.
    """
    found = []
    for layer in model.layers:
        linears: dict[int, Linear] = {}
        match layer.mixer:
            case AttentionBlock() as attention:
                linears |= {0: attention.qkv, 4: attention.output}
            case ShortConvBlock() | Mamba2Block() as recurrent:
                linears |= {0: recurrent.input, 4: recurrent.output}
            case GatedDeltaBlock() as recurrent:
                linears |= {0: recurrent.input, 2: recurrent.rates, 4: recurrent.output}
            case LatentAttentionBlock() as attention:
                linears |= {0: attention.query, 1: attention.latent, 4: attention.output}
                linears |= {} if attention.query_up is None else {2: attention.query_up}
        match layer.common_mlp:
            case GatedMlp() as mlp:
                linears |= {5: mlp.gate_up, 7: mlp.down}
            case PlainMlp() as mlp:
                linears |= {6: mlp.up, 7: mlp.down}
        if layer.layer_input is not None:
            linears |= {8: layer.layer_input.gate, 9: layer.layer_input.output}
        found.append({n: linear.name for n, linear in linears.items() if isinstance(linear, AdaptableLinear)})
    return found


def _has_two_forms(layer: DecoderLayer) -> bool:
    weights = [linear.native_weights for linear in layer.linears]
    return any(native is not None and native.few is not native.many for native in weights)
