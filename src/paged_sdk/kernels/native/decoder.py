"""Runs a stack of decoder layers on packed weights and a paged KV cache in one native call per step."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, sizeof
from types import MappingProxyType
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import describe, float_vector, pointer
from paged_sdk.kernels.native.lora import NativeAdapters
from paged_sdk.kernels.native.norm import NORMS
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.paged_attention import (
    AttentionShape,
    VarlenBatch,
    describe_batch,
    describe_cache,
    describe_heads,
)
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.ranks import SharedSum
from paged_sdk.kernels.native.recurrent import NativeRecurrentRows
from paged_sdk.kernels.native.structures import ACTIVATIONS, Decoder, Layer, Rope, Weight

__all__ = ["EmbeddingTable", "NativeDecoder", "Turns"]

_NO_SUCH_ROW: Final = 3
_ANY_WIDTH: Final = 2**16
_HEAD_NORMS: Final = MappingProxyType({"shared": 0, "own": 1, "whole": 2})
_GATES: Final = MappingProxyType({None: 0, "apart": 1, "with queries": 2})


@frozen(eq=False)
class EmbeddingTable:
    """Holds the embeddings of tokens.

    :ivar weight: ``[vocab_size, hidden]``, in the order of its columns
    :ivar scale: multiplies the rows
    :ivar stream_scale: multiplies what that gives
    """

    weight: PackedWeight
    scale: float = 1.0
    stream_scale: float = 1.0


@frozen(eq=False)
class Turns:
    """Holds what a rotary embedding's angles at a position follow from, and the factor of queries there.

    :ivar frequencies: ``[n]`` float32, in radians per position
    :ivar factor: multiplies cosines and sines
    :ivar query_scale_beta: queries at position p are multiplied by ``1 + query_scale_beta * log(1 + floor(p /
        query_scale_length))``
    :ivar query_scale_length: 1 or more with a ``query_scale_beta``
    """

    frequencies: Tensor
    factor: float = 1.0
    query_scale_beta: float = 0.0
    query_scale_length: int = 1


class NativeDecoder:
    """Runs decoder layers: a whole step is one native call in one parallel region.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param interleaved: for each rotary embedding, whether it rotates interleaved pairs (elements 2i and 2i + 1), whose
        results are stored as two halves; empty: none does
    :param shared: sums or gathers results of all ranks; None: this process computes everything
    :param turns: for each rotary embedding, what its cosines and sines are made of in calls that are given positions;
        empty: calls are given cosines and sines
    :param embedding: the embeddings that calls with token ids begin with; None: calls are given the residual stream
    :raises ConfigError: shapes or the lengths of ``interleaved`` or ``turns`` do not fit, or only some layers have
        output norms or are parallel
    """

    def __init__(
        self,
        workspace: Workspace,
        layers: Sequence[DecoderLayer],
        *,
        interleaved: Sequence[bool] = (),
        shared: SharedSum | None = None,
        turns: Sequence[Turns] = (),
        embedding: EmbeddingTable | None = None,
    ) -> None:
        self.hidden_size: int = layers[0].hidden_size
        if len({layer.attention_output_norm is None for layer in layers}) > 1:
            raise ConfigError.of("attention_output_norm", "of some layers", "one in all layers, or in none")
        if len({layer.parallel for layer in layers}) > 1:
            raise ConfigError.of("parallel", "of some layers", "True in all layers, or in none")
        self._workspace = workspace
        self._max_interleaved = workspace.library.max_interleaved
        self._shared = shared
        self._layers = tuple(layers)
        recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
        self._is_recurrent = bool(recurrent)
        self._most_drafts = min((each.most_drafts for each in recurrent), default=0)
        inputs = [layer.layer_input for layer in layers if layer.layer_input is not None]
        self._input_columns = max((each.column + each.size for each in inputs), default=0)
        num_ropes = 1 + max(layer.rope for layer in layers)
        # A rotary embedding may be at most as wide as the smallest heads of the layers that use it, if any do.
        rotated = [(layer.rope, _rotated(layer)) for layer in layers]
        self._widest_ropes = [
            min((size // 2 for own, size in rotated if own == rope and size is not None), default=_ANY_WIDTH)
            for rope in range(num_ropes)
        ]
        self._kept: list[Tensor | None] = []  # tensors that the C structures point to, apart from the layers' own
        self._table = (Layer * len(layers))()
        for target, layer in zip(self._table, layers, strict=True):
            self._describe(target, layer)
        self._ropes = (Rope * num_ropes)()
        for name, given in (("interleaved", interleaved), ("turns", turns)):
            if len(given) not in (0, num_ropes):
                allowed = f"0 or {num_ropes}, the number of rotary embeddings that the layers name"
                raise ConfigError.of(f"len({name})", len(given), allowed)
        for rope, pairs_neighbours in zip(self._ropes, interleaved or [False] * num_ropes, strict=True):
            rope.interleaved = pairs_neighbours
        self._turns = tuple(turns)
        for rope, turn, widest in zip(self._ropes, turns, self._widest_ropes, strict=False):
            half = len(turn.frequencies)
            self._check_half("frequencies", turn.frequencies, widest, interleaved=bool(rope.interleaved))
            _check_contiguous("frequencies", turn.frequencies, (half,), torch.float32)
            if turn.query_scale_length < 1 and turn.query_scale_beta:
                raise ConfigError.of("query_scale_length", turn.query_scale_length, "1 or more")
            rope.frequencies, rope.factor = turn.frequencies.data_ptr(), turn.factor
            rope.query_scale_beta, rope.query_scale_length = turn.query_scale_beta, turn.query_scale_length
        self._args = Decoder(
            ropes=addressof(self._ropes),
            workspace=workspace.handle,
            sum=None if shared is None else shared.sum_address,
            gather=None if shared is None else shared.gather_address,
            group=None if shared is None else shared.handle,
            num_threads=workspace.num_threads,
            num_ropes=num_ropes,
            hidden_size=self.hidden_size,
        )
        self._embedding = embedding
        if embedding is not None:
            weight = embedding.weight
            if weight.cols != self.hidden_size or weight.order is not None:
                allowed = f"{self.hidden_size} columns, in their order"
                raise ConfigError.of("embedding.weight", f"{weight.cols} columns", allowed)
            describe(self._args.embedding, weight, None)
            self._args.embedding_scale, self._args.stream_scale = embedding.scale, embedding.stream_scale

    def _describe(self, target: Layer, layer: DecoderLayer) -> None:
        hidden = self.hidden_size
        for matrix, each in zip(target.qkv, layer.qkv, strict=False):
            self._describe_projection(matrix, each)
        for name in ("attended_widths", "inner_widths", "hidden_widths"):
            widths: Tensor | None = getattr(layer, name)
            assert widths is None or (widths.dtype is torch.int32 and widths.is_contiguous())
            setattr(target, name, pointer(widths))  # the layer keeps it
        if layer.hidden_widths is not None and self._shared is not None:
            target.first_hidden = int(layer.hidden_widths[: self._shared.rank].sum())
        for name in ("output", "gate", "up", "down"):
            if (projection := getattr(layer, name)) is not None:
                self._describe_projection(getattr(target, name), projection)
        if (own := layer.layer_input) is not None:
            self._describe_projection(target.input_gate, own.gate)
            self._describe_projection(target.input_output, own.output)
            target.input_norm = self._vector("layer_input.norm", own.norm, hidden)
            target.input_column = own.column
        target.shares_keys, target.keys_as_values = layer.shares_keys, layer.keys_as_values
        target.value_norm, target.norms_last, target.scale = layer.value_norm, layer.norms_last, layer.scale
        target.gates = _GATES[layer.gates]
        if layer.recurrent is not None:
            self._kept += layer.recurrent.describe(target.recurrent)
        if layer.mixture is not None:
            self._kept += layer.mixture.describe(target.mixture)
        if layer.shape is not None and layer.cache is not None:
            self._describe_heads(target, layer, layer.shape, layer.cache)
        for name, length in (
            ("attention_norm", hidden),
            ("attention_norm_bias", hidden),
            ("attention_output_norm", hidden),
            ("mlp_norm", hidden),
            ("mlp_norm_bias", hidden),
            ("mlp_output_norm", hidden),
            ("xielu", 4),
        ):
            setattr(target, name, self._vector(name, getattr(layer, name), length))
        target.norm, target.head_norm = NORMS[layer.norm], _HEAD_NORMS[layer.head_norm]
        target.parallel, target.qkv_clip = layer.parallel, layer.clip or 0.0
        target.num_qkv = len(layer.qkv)
        target.rope = layer.rope
        target.activation = ACTIVATIONS[layer.activation]
        target.norm_eps = layer.norm_eps

    def _describe_heads(self, target: Layer, layer: DecoderLayer, shape: AttentionShape, cache: LayerCache) -> None:
        size = shape.head_dim
        of_queries, of_keys = (
            size if layer.head_norm == "shared" else count * size for count in (shape.num_heads, shape.num_kv_heads)
        )
        target.query_norm = self._vector("query_norm", layer.query_norm, of_queries)
        target.query_norm_bias = self._vector("query_norm_bias", layer.query_norm_bias, size)
        target.key_norm = self._vector("key_norm", layer.key_norm, of_keys)
        target.key_norm_bias = self._vector("key_norm_bias", layer.key_norm_bias, size)
        target.heads = describe_heads(shape, cache)
        target.heads.sinks = self._vector("sinks", layer.sinks, shape.num_heads)
        target.cache = describe_cache(cache)
        if cache.basis is not None:
            target.cache.key_factors = pointer(cache.basis.factors)  # the layer keeps it
        if layer.latent is not None:
            self._kept += layer.latent.describe(target.latent, shape)

    def _vector(self, name: str, vector: Tensor | None, length: int) -> int | None:
        """Convert a vector to float32, keep it alive, and return its address; None without a vector."""
        kept = float_vector(name, vector, length)
        self._kept.append(kept)
        return pointer(kept)

    def _describe_projection(self, target: Weight, projection: Projection) -> None:
        self._kept.append(projection.describe(target))

    def __call__(
        self,
        hidden: Tensor,
        ropes: Sequence[tuple[Tensor, ...]] | Tensor,
        slots: Tensor,
        batch: VarlenBatch,
        cu_seqlens_read: Tensor | None = None,
        adapters: NativeAdapters | None = None,
        *,
        layers: range | None = None,
        layer_inputs: Tensor | None = None,
        token_ids: Tensor | None = None,
        states: NativeRecurrentRows | None = None,
    ) -> Tensor:
        """Run all layers, or a range of consecutive ones.

        :param hidden: [num_tokens, hidden] float32, contiguous; changed in place
        :param ropes: for each rotary embedding, cosines and sines at the tokens' positions, [num_tokens, n] float32
            each, contiguous: elements i and n + i of a head are rotated; n is at most half a head. A third tensor,
            [num_tokens] float32, has factors of queries. Or the positions, [num_tokens] int64, contiguous, of which all
            this is made
        :param slots: [num_tokens] int64: slots of the tokens' keys and values, ``block * block_size + offset``
        :param batch: the step's sequences; their contexts include the new tokens
        :param cu_seqlens_read: [num_seqs + 1] int32, contiguous: of sequence s, only the last ``cu_seqlens_read[s + 1]
            - cu_seqlens_read[s]`` rows of ``hidden`` will be read, and other rows may be left undefined; None: all
            rows will be read
        :param adapters: the adapter of each token; None: no adapters
        :param layers: the layers to run, a range with step 1; None: all
        :param layer_inputs: [num_tokens, columns of all layers] float32, contiguous: the tokens' vectors for layers
            with a :attr:`~DecoderLayer.layer_input`; None: no layer has one
        :param token_ids: [num_tokens] int64, contiguous: ``hidden``, which may be undefined, begins as the embeddings
            of these; None: it is given
        :param states: the same tokens by the states of their sequences; None: no layer is recurrent
        :returns: ``hidden``
        :raises ConfigError: shapes or dtypes do not fit, or positions or token ids are given and the decoder has not
            what they are to be looked up in
        :raises IndexError: a token is not in the embedding
        """
        num_tokens = hidden.shape[0]
        _check_contiguous("hidden", hidden, (num_tokens, self.hidden_size), torch.float32)
        _check_contiguous("slots", slots, (num_tokens,), torch.int64)
        self._give_ropes(ropes, num_tokens)
        if token_ids is not None:
            if self._embedding is None:
                raise ConfigError.of("token_ids", token_ids.shape, "None for a decoder without embedding")
            _check_contiguous("token_ids", token_ids, (num_tokens,), torch.int64)
        if cu_seqlens_read is not None:
            _check_contiguous("cu_seqlens_read", cu_seqlens_read, batch.cu_seqlens_q.shape, torch.int32)
        columns = 0 if layer_inputs is None else layer_inputs.shape[-1]
        if columns < self._input_columns:
            raise ConfigError.of("layer_inputs", columns, f"at least {self._input_columns} columns")
        if self._is_recurrent if states is None else states.num_tokens != num_tokens:
            found = None if states is None else f"of {states.num_tokens} tokens"
            raise ConfigError.of("states", found, f"of {num_tokens} tokens, with recurrent layers")
        if states is not None and states.num_drafts:
            states.check_drafts(self._most_drafts, self._workspace)
        if layer_inputs is not None:
            _check_contiguous("layer_inputs", layer_inputs, (num_tokens, columns), torch.float32)
        layers = range(len(self._layers)) if layers is None else layers
        args = self._args
        args.layers, args.num_layers = addressof(self._table) + layers.start * sizeof(Layer), len(layers)
        args.cu_seqlens_read = pointer(cu_seqlens_read)
        args.hidden, args.slots = hidden.data_ptr(), slots.data_ptr()
        args.layer_inputs, args.layer_input_stride = pointer(layer_inputs), columns
        args.token_ids = pointer(token_ids)
        args.batch = describe_batch(batch)
        if states is not None:
            args.recurrent = states.args
        args.num_rows = num_tokens
        args.num_adapters, kept = 0, None
        if adapters is not None:
            kept = adapters.bind(args, num_layers=len(self._layers), num_rows=num_tokens, first_layer=layers.start)
        library = self._workspace.library
        failed = library.functions.paged_decoder(library.level, byref(args))
        if failed == _NO_SUCH_ROW:
            assert token_ids is not None
            assert self._embedding is not None
            raise IndexError(f"tokens {token_ids.tolist()[:10]} are not all below {self._embedding.weight.rows}")
        if failed:
            raise MemoryError("no memory for the scratch of native decoder layers")
        del kept
        return hidden

    def _give_ropes(self, ropes: Sequence[tuple[Tensor, ...]] | Tensor, num_tokens: int) -> None:
        """Give the C structures a step's cosines and sines, or the positions of which the call makes them."""
        if isinstance(ropes, Tensor):
            if not self._turns:
                raise ConfigError.of("ropes", "positions", "cosines and sines for a decoder without turns")
            _check_contiguous("ropes", ropes, (num_tokens,), torch.int64)
            self._args.positions = ropes.data_ptr()
            for target, turn in zip(self._ropes, self._turns, strict=True):
                target.cosines, target.query_scales, target.half = None, None, len(turn.frequencies)
            return
        if len(ropes) != len(self._ropes):
            raise ConfigError.of("ropes", len(ropes), f"one for each that the layers name: {len(self._ropes)}")
        for target, (cosines, sines, *scales), widest in zip(self._ropes, ropes, self._widest_ropes, strict=True):
            half = cosines.shape[-1]
            self._check_half("cosines", cosines, widest, interleaved=bool(target.interleaved))
            _check_contiguous("cosines", cosines, (num_tokens, half), torch.float32)
            _check_contiguous("sines", sines, (num_tokens, half), torch.float32)
            for each in scales:
                _check_contiguous("query_scales", each, (num_tokens,), torch.float32)
            target.cosines, target.sines, target.half = cosines.data_ptr(), sines.data_ptr(), half
            target.query_scales = scales[0].data_ptr() if scales else None

    def _check_half(self, name: str, numbers: Tensor, widest: int, *, interleaved: bool) -> None:
        """Check how many pairs a rotary embedding turns.

        :param widest: half of the smallest heads of the layers that use it
        """
        most = min(widest, self._max_interleaved // 2) if interleaved else widest
        if numbers.shape[-1] > most:
            raise ConfigError.of(f"{name}.shape", tuple(numbers.shape), f"at most {most} columns")


def _rotated(layer: DecoderLayer) -> int | None:
    """Return the most elements of a head that a rotary embedding may rotate; None: the layer has no attention."""
    if layer.latent is not None:
        return layer.latent.rope_dim
    return None if layer.shape is None else layer.shape.head_dim


def _check_contiguous(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ConfigError.of(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {dtype} {tuple(shape)}")
