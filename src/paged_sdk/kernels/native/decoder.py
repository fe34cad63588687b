"""Runs a stack of decoder layers on packed weights and a paged KV cache in one native call per step.

The basic layer is llama's: RMSNorm, attention with rotary embedding, residual; RMSNorm, gated MLP, residual. Options
cover other families: biases of any matrix (Qwen2, some Llamas), norms of query and key heads (Qwen3), norms of the
outputs of attention and MLP, in addition to those of the inputs (Gemma) or instead of them (OLMo 2), rotary embeddings
that differ between layers (Gemma 3) or are interleaved (GLM), layer norms and MLPs without a gate (StarCoder 2), MLPs
parallel to attention (Command R), and mixtures of experts (Mixtral).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, sizeof
from types import MappingProxyType
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native.experts import check_experts
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, check_weights, describe, float_vector, pointer
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
from paged_sdk.kernels.native.ranks import SharedSum
from paged_sdk.kernels.native.structures import ACTIVATIONS, DTYPES, Decoder, Layer, Rope, Weight

__all__ = ["DecoderLayer", "LayerInput", "NativeDecoder", "Projection", "Router"]

_HEAD_NORMS: Final = MappingProxyType({"shared": 0, "own": 1, "whole": 2})


@frozen(eq=False, kw_only=True)
class Router:
    """Describes a router that selects each token's experts: the likeliest of a softmax over all experts.

    :ivar weight: [num_experts, hidden] float32 or bfloat16, contiguous
    :ivar num_selected: number of experts per token
    :ivar renormalize: whether the weights of the selected experts are divided by their sum
    :ivar bias: [num_experts], added to the router's logits; None: no bias
    :ivar swiglu: alpha and limit of experts that compute ``(up + 1) * gate * sigmoid(alpha * gate)`` with clamped gate
        and up; None: experts compute ``up * silu(gate)``
    """

    weight: Tensor
    num_selected: int
    renormalize: bool
    bias: Tensor | None = None
    swiglu: tuple[float, float] | None = None

    def __attrs_post_init__(self) -> None:
        if not self.weight.is_contiguous():
            raise ConfigError.of("router.weight.stride()", self.weight.stride(), "a contiguous tensor")
        if not 1 <= self.num_selected <= self.num_experts:
            raise ConfigError.of("num_selected", self.num_selected, f"1 to num_experts = {self.num_experts}")

    @property
    def num_experts(self) -> int:
        return len(self.weight)


@frozen(eq=False)
class Projection:
    """Holds a matrix and its bias.

    :ivar weight: [rows, cols], packed
    :ivar bias: [rows]; None: no bias
    """

    weight: PackedWeight
    bias: Tensor | None = None


@frozen(eq=False, kw_only=True)
class LayerInput:
    """Describes what a layer adds of a token besides its embedding: ``norm(output @ (activation(gate @ x) * input))``,
    of the residual stream after the feed-forward network, and a vector ``input`` of the token.

    :ivar gate: [size, hidden]; size is a multiple of 16
    :ivar output: [hidden, size]
    :ivar norm: [hidden], weight of the RMSNorm of the result
    :ivar column: first column of the layer's vectors in the step's
    """

    gate: Projection
    output: Projection
    norm: Tensor
    column: int

    @property
    def size(self) -> int:
        return self.gate.weight.rows


@frozen(eq=False, kw_only=True)
class DecoderLayer:
    """Holds the weights and settings of one layer. Hidden and inner sizes are multiples of 16.

    :ivar qkv: query, key and value [.., hidden], or one fused matrix; only query with ``shares_keys``
    :ivar output: [hidden, num_heads * head_dim]
    :ivar router: selects experts, whose concatenated matrices are ``gate``, ``up`` and ``down``; None: one MLP for all
        tokens
    :ivar gate: [inner, hidden]; None: an MLP without a gate, whose activation is applied to ``up``
    :ivar up: [inner, hidden]
    :ivar down: [hidden, inner]
    :ivar norm: the kind of the norms before attention and MLP, and of shared head norms
    :ivar attention_norm: [hidden], weight of the norm before attention; None: no norm
    :ivar attention_norm_bias: [hidden], bias of a layer norm; None: no bias; other biases of norms likewise
    :ivar attention_output_norm: [hidden], weight of the RMSNorm of attention's output, before the residual addition;
        None: no norm
    :ivar mlp_norm: [hidden], weight of the norm before the MLP; None: no norm
    :ivar mlp_output_norm: [hidden], weight of the RMSNorm of the MLP's output; given if and only if
        ``attention_output_norm`` is
    :ivar head_norm: whether norms of queries and keys have one weight [head_dim] for all heads ("shared"), a weight per
        head ("own"), or normalize all heads as one vector ("whole")
    :ivar query_norm: weight of the norm of queries before rotation; None: no norm
    :ivar key_norm: likewise for keys
    :ivar value_norm: whether each head's values are divided by their root mean square
    :ivar shares_keys: whether the layer attends over keys and values that an earlier layer has written to ``cache``
    :ivar layer_input: what the layer adds of a token besides its embedding, with norms of outputs only; None: nothing
    :ivar scale: multiplies the residual stream after the layer, with norms of outputs only
    :ivar clip: limit of the magnitude of queries, keys and values; None: no limit
    :ivar sinks: [num_heads], an extra logit without a value in each head's softmax; None: no sinks
    :ivar parallel: whether the MLP reads the same normalized input as attention, and both outputs are added at once
    :ivar rope: index of the layer's rotary embedding among the step's
    :ivar attended_widths: [num_ranks] int32: the columns of attention's output that each rank computes; they are
        gathered before ``output``, which has all columns and this rank's rows. None: ``output`` has this rank's columns
        and all rows, and its results are summed over ranks
    :ivar inner_widths: likewise for the input of ``down``; with experts, the neurons per expert
    :ivar hidden_widths: [num_ranks] int32: the rows of ``output``, and of ``down``, that each rank has in that case
    """

    shape: AttentionShape
    cache: LayerCache
    qkv: tuple[Projection, ...]
    output: Projection
    router: Router | None = None
    gate: Projection | None
    up: Projection
    down: Projection
    norm: Literal["rms", "layer"] = "rms"
    attention_norm: Tensor | None
    attention_norm_bias: Tensor | None = None
    attention_output_norm: Tensor | None = None
    mlp_norm: Tensor | None
    mlp_norm_bias: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    head_norm: Literal["shared", "own", "whole"] = "shared"
    query_norm: Tensor | None = None
    query_norm_bias: Tensor | None = None
    key_norm: Tensor | None = None
    key_norm_bias: Tensor | None = None
    value_norm: bool = False
    shares_keys: bool = False
    layer_input: LayerInput | None = None
    scale: float = 1.0
    norm_eps: float
    clip: float | None = None
    sinks: Tensor | None = None
    parallel: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    rope: int = 0
    attended_widths: Tensor | None = None
    inner_widths: Tensor | None = None
    hidden_widths: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        hidden, size = self.hidden_size, self.shape.head_dim
        queries = self.shape.num_heads * size
        check_weights([each.weight for each in self.qkv])
        if len(self.qkv) not in (1, 3):
            raise ConfigError.of("qkv", len(self.qkv), "one or three weights")
        if (self.attention_output_norm is None) != (self.mlp_output_norm is None):
            raise ConfigError.of("mlp_output_norm", self.mlp_output_norm, "given where attention_output_norm is")
        if self.attention_output_norm is not None and (self.parallel or self.norm != "rms"):
            raise ConfigError.of("attention_output_norm", "given", "none, in parallel and with layer norms")
        head_biases = (self.query_norm_bias, self.key_norm_bias)
        biases = (*head_biases, self.attention_norm_bias, self.mlp_norm_bias)
        if self.norm == "rms" and any(each is not None for each in biases):
            raise ConfigError.of("bias", "of an RMSNorm", "none")
        if self.head_norm != "shared" and any(each is not None for each in head_biases):
            raise ConfigError.of("query_norm_bias", "given", "none, unless all heads share it")
        if self.parallel and (self.router is not None or self.mlp_norm is not None):
            raise ConfigError.of(
                "parallel", True, "False with experts, and with a norm before the feed-forward network"
            )
        if self.mlp_output_norm is None and (self.layer_input is not None or self.scale != 1.0):
            raise ConfigError.of("mlp_output_norm", None, "a norm, with a layer's own input or scale")
        keys = 0 if self.shares_keys else self.shape.num_kv_heads * size
        expected = {
            "qkv": (queries + 2 * keys, hidden),
            "output": self._last_shape(self.output.weight.rows, self.attended_widths, queries),
        }
        found = {"qkv": (sum(each.weight.rows for each in self.qkv), hidden), "output": _shape(self.output)}
        if self.router is None:
            check_weights([each.weight for each in (self.gate, self.up) if each is not None])
            inner = self.up.weight.rows
            if hidden % 16 or inner % 16:
                raise ConfigError.of("hidden and inner size", (hidden, inner), "multiples of 16")
            expected |= {"gate": (inner, hidden), "up": (inner, hidden)}
            expected["down"] = self._last_shape(self.down.weight.rows, self.inner_widths, inner)
            found |= {"gate": _shape(self.gate or self.up), "up": _shape(self.up), "down": _shape(self.down)}
        else:
            self._check_experts(self.router)
        if (own := self.layer_input) is not None:
            if own.size % 16:
                raise ConfigError.of("layer_input.size", own.size, "a multiple of 16")
            expected |= {"input gate": (own.size, hidden), "input output": (hidden, own.size)}
            found |= {"input gate": _shape(own.gate), "input output": _shape(own.output)}
        if found != expected:
            raise ConfigError.of("shapes of a layer's weights", found, str(expected))

    @property
    def hidden_size(self) -> int:
        return self.qkv[0].weight.cols

    def _last_shape(self, rows: int, widths: Tensor | None, own_width: int) -> tuple[int, int]:
        """Return the required shape of ``output`` or ``down``.

        :param rows: its number of rows
        :param widths: ``attended_widths`` or ``inner_widths``
        :param own_width: the number of columns that this rank computes
        """
        if widths is None:
            return self.hidden_size, own_width
        of_hidden = [] if self.hidden_widths is None else self.hidden_widths.tolist()
        if sum(of_hidden) != self.hidden_size or rows not in of_hidden or own_width not in widths.tolist():
            raise ConfigError.of("hidden_widths", of_hidden, f"parts of {self.hidden_size}, this process's among them")
        return rows, int(widths.sum())

    def _check_experts(self, router: Router) -> None:
        check_matrix("router.weight", router.weight, (router.num_experts, self.hidden_size))
        if self.gate is None:
            raise ConfigError.of("gate", None, "a weight, which experts have")
        experts = self.gate, self.up, self.down
        gate, up, down = (each.weight for each in experts)
        check_experts(gate, up, down, num_experts=router.num_experts, widths=self.inner_widths)
        self._last_shape(down.rows // router.num_experts, self.inner_widths, gate.rows // router.num_experts)
        if self.activation != "silu":
            raise ConfigError.of("activation", self.activation, "silu, which experts have")


def _shape(projection: Projection) -> tuple[int, int]:
    return projection.weight.rows, projection.weight.cols


class NativeDecoder:
    """Runs decoder layers: a whole step is one native call in one parallel region.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param interleaved: for each rotary embedding, whether it rotates interleaved pairs (elements 2i and 2i + 1), whose
        results are stored as two halves; empty: none does
    :param shared: sums or gathers results of all ranks; None: this process computes everything
    :raises ConfigError: shapes or the length of ``interleaved`` do not fit, or only some layers have output norms or
        are parallel
    """

    def __init__(
        self,
        workspace: Workspace,
        layers: Sequence[DecoderLayer],
        *,
        interleaved: Sequence[bool] = (),
        shared: SharedSum | None = None,
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
        inputs = [layer.layer_input for layer in layers if layer.layer_input is not None]
        self._input_columns = max((each.column + each.size for each in inputs), default=0)
        num_ropes = 1 + max(layer.rope for layer in layers)
        # A rotary embedding may be at most as wide as the smallest heads of the layers that use it.
        self._widest_ropes = [
            min((layer.shape.head_dim // 2 for layer in layers if layer.rope == rope), default=0)
            for rope in range(num_ropes)
        ]
        self._kept: list[Tensor | None] = []  # tensors that the C structures point to, apart from the layers' own
        self._table = (Layer * len(layers))()
        for target, layer in zip(self._table, layers, strict=True):
            self._describe(target, layer)
        self._ropes = (Rope * num_ropes)()
        if len(interleaved) not in (0, num_ropes):
            allowed = f"0 or {num_ropes}, the number of rotary embeddings that the layers name"
            raise ConfigError.of("len(interleaved)", len(interleaved), allowed)
        for rope, pairs_neighbours in zip(self._ropes, interleaved or [False] * num_ropes, strict=True):
            rope.interleaved = pairs_neighbours
        self._args = Decoder(
            ropes=addressof(self._ropes),
            workspace=workspace.handle,
            sum=None if shared is None else shared.sum_address,
            gather=None if shared is None else shared.gather_address,
            group=None if shared is None else shared.handle,
            num_threads=workspace.num_threads,
        )

    def _describe(self, target: Layer, layer: DecoderLayer) -> None:
        hidden, size = self.hidden_size, layer.shape.head_dim
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
        target.shares_keys, target.value_norm, target.scale = layer.shares_keys, layer.value_norm, layer.scale
        if (router := layer.router) is not None:
            target.router.bias = self._vector("router.bias", router.bias, router.num_experts)
            target.router.weight, target.router.dtype = router.weight.data_ptr(), DTYPES[router.weight.dtype]
            target.router.num_experts, target.router.num_selected = router.num_experts, router.num_selected
            target.router.renormalize = router.renormalize
            target.router.swiglu_alpha, target.router.swiglu_limit = router.swiglu or (0.0, 0.0)
        of_queries, of_keys = (
            size if layer.head_norm == "shared" else count * size
            for count in (layer.shape.num_heads, layer.shape.num_kv_heads)
        )
        for name, length in (
            ("attention_norm", hidden),
            ("attention_norm_bias", hidden),
            ("attention_output_norm", hidden),
            ("mlp_norm", hidden),
            ("mlp_norm_bias", hidden),
            ("mlp_output_norm", hidden),
            ("query_norm", of_queries),
            ("query_norm_bias", size),
            ("key_norm", of_keys),
            ("key_norm_bias", size),
        ):
            setattr(target, name, self._vector(name, getattr(layer, name), length))
        target.norm, target.head_norm = NORMS[layer.norm], _HEAD_NORMS[layer.head_norm]
        target.parallel, target.qkv_clip = layer.parallel, layer.clip or 0.0
        target.heads = describe_heads(layer.shape, layer.cache)
        target.heads.sinks = self._vector("sinks", layer.sinks, layer.shape.num_heads)
        target.cache = describe_cache(layer.cache)
        if layer.cache.basis is not None:
            target.cache.key_factors = pointer(layer.cache.basis.factors)  # the layer keeps it
        target.num_qkv = len(layer.qkv)
        target.rope = layer.rope
        target.activation = ACTIVATIONS[layer.activation]
        target.norm_eps = layer.norm_eps

    def _vector(self, name: str, vector: Tensor | None, length: int) -> int | None:
        """Convert a vector to float32, keep it alive, and return its address; None without a vector."""
        kept = float_vector(name, vector, length)
        self._kept.append(kept)
        return pointer(kept)

    def _describe_projection(self, target: Weight, projection: Projection) -> None:
        bias = float_vector("bias", projection.bias, projection.weight.rows)
        self._kept.append(bias)
        describe(target, projection.weight, bias)

    def __call__(
        self,
        hidden: Tensor,
        ropes: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        batch: VarlenBatch,
        cu_seqlens_read: Tensor | None = None,
        adapters: NativeAdapters | None = None,
        *,
        layers: range | None = None,
        layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """Run all layers, or a range of consecutive ones.

        :param hidden: [num_tokens, hidden] float32, contiguous; changed in place
        :param ropes: for each rotary embedding, cosines and sines at the tokens' positions, [num_tokens, n] float32
            each, contiguous: elements i and n + i of a head are rotated; n is at most half a head
        :param slots: [num_tokens] int64: slots of the tokens' keys and values, ``block * block_size + offset``
        :param batch: the step's sequences; their contexts include the new tokens
        :param cu_seqlens_read: [num_seqs + 1] int32, contiguous: of sequence s, only the last ``cu_seqlens_read[s + 1]
            - cu_seqlens_read[s]`` rows of ``hidden`` will be read, and other rows may be left undefined; None: all
            rows will be read
        :param adapters: the adapter of each token; None: no adapters
        :param layers: the layers to run, a range with step 1; None: all
        :param layer_inputs: [num_tokens, columns of all layers] float32, contiguous: the tokens' vectors for layers
            with a :attr:`~DecoderLayer.layer_input`; None: no layer has one
        :returns: ``hidden``
        :raises ConfigError: shapes or dtypes do not fit
        """
        num_tokens = hidden.shape[0]
        _check_contiguous("hidden", hidden, (num_tokens, self.hidden_size), torch.float32)
        _check_contiguous("slots", slots, (num_tokens,), torch.int64)
        if len(ropes) != len(self._ropes):
            raise ConfigError.of("ropes", len(ropes), f"one for each that the layers name: {len(self._ropes)}")
        for target, (cosines, sines), widest in zip(self._ropes, ropes, self._widest_ropes, strict=True):
            half = cosines.shape[-1]
            most = min(widest, self._max_interleaved // 2) if target.interleaved else widest
            if half > most:
                raise ConfigError.of("cosines.shape", tuple(cosines.shape), f"at most {most} columns")
            _check_contiguous("cosines", cosines, (num_tokens, half), torch.float32)
            _check_contiguous("sines", sines, (num_tokens, half), torch.float32)
            target.cosines, target.sines, target.half = cosines.data_ptr(), sines.data_ptr(), half
        if cu_seqlens_read is not None:
            _check_contiguous("cu_seqlens_read", cu_seqlens_read, batch.cu_seqlens_q.shape, torch.int32)
        columns = 0 if layer_inputs is None else layer_inputs.shape[-1]
        if columns < self._input_columns:
            raise ConfigError.of("layer_inputs", columns, f"at least {self._input_columns} columns")
        if layer_inputs is not None:
            _check_contiguous("layer_inputs", layer_inputs, (num_tokens, columns), torch.float32)
        layers = range(len(self._layers)) if layers is None else layers
        args = self._args
        args.layers, args.num_layers = addressof(self._table) + layers.start * sizeof(Layer), len(layers)
        args.cu_seqlens_read = pointer(cu_seqlens_read)
        args.hidden, args.slots = hidden.data_ptr(), slots.data_ptr()
        args.layer_inputs, args.layer_input_stride = pointer(layer_inputs), columns
        args.batch = describe_batch(batch)
        args.num_rows = num_tokens
        args.num_adapters, kept = 0, None
        if adapters is not None:
            kept = adapters.bind(args, num_layers=len(self._layers), num_rows=num_tokens, first_layer=layers.start)
        library = self._workspace.library
        if library.functions.paged_decoder(library.level, byref(args)):
            raise MemoryError("no memory for the scratch of native decoder layers")
        del kept
        return hidden


def _check_contiguous(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ConfigError.of(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {dtype} {tuple(shape)}")
