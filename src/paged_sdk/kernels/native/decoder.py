"""A stack of decoder layers on packed weights and a paged KV cache: one native call per step.

The layer is llama's: RMSNorm, attention with rotary embedding, residual; RMSNorm, gated feed-forward, residual; with
biases on query, key and value (Qwen2) and norms of query and key heads (Qwen3) where given, and with a mixture of
experts in the place of the feed-forward network (Mixtral) where there is a router.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.experts import check_experts
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, check_weights, describe, float_vector, pointer
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.paged_attention import (
    AttentionShape,
    LayerCache,
    VarlenBatch,
    describe_batch,
    describe_cache,
    describe_heads,
)
from paged_sdk.kernels.native.structures import ACTIVATIONS, DTYPES, Decoder, Layer

__all__ = ["DecoderLayer", "NativeDecoder", "Router"]


@frozen(eq=False, kw_only=True)
class Router:
    """Chooses the experts of each token: the likeliest of a softmax over all of them.

    :ivar weight: [num_experts, hidden] float32 or bfloat16, contiguous
    :ivar num_selected: experts of each token
    :ivar renormalize: their weights add up to 1; False: they are what the softmax gave
    """

    weight: Tensor
    num_selected: int
    renormalize: bool

    def __attrs_post_init__(self) -> None:
        if not self.weight.is_contiguous():
            raise ConfigError.of("router.weight.stride()", self.weight.stride(), "a contiguous tensor")
        if not 1 <= self.num_selected <= self.num_experts:
            raise ConfigError.of("num_selected", self.num_selected, f"1 to num_experts = {self.num_experts}")

    @property
    def num_experts(self) -> int:
        return len(self.weight)


@frozen(eq=False, kw_only=True)
class DecoderLayer:
    """What one layer is made of.

    :ivar qkv: query, key and value [.., hidden], or one matrix that is all three
    :ivar qkv_biases: one per matrix of ``qkv``, or None
    :ivar output: [hidden, num_heads * head_dim]
    :ivar router: of experts, which ``gate``, ``up`` and ``down`` then hold one below the other, packed; None: there is
        one feed-forward network for all tokens
    :ivar gate: [inner, hidden], inner a multiple of 32
    :ivar up: [inner, hidden]
    :ivar down: [hidden, inner]
    :ivar attention_norm: [hidden]
    :ivar mlp_norm: [hidden]
    :ivar query_norm: [head_dim], of every query head before rotation; None: there is none
    :ivar key_norm: likewise
    """

    shape: AttentionShape
    cache: LayerCache
    qkv: tuple[PackedWeight, ...]
    qkv_biases: tuple[Tensor | None, ...]
    output: PackedWeight
    router: Router | None = None
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"] = "silu"

    def __attrs_post_init__(self) -> None:
        hidden, size = self.qkv[0].cols, self.shape.head_dim
        queries = self.shape.num_heads * size
        check_weights(self.qkv)
        expected = {"qkv": (queries + 2 * self.shape.num_kv_heads * size, hidden), "output": (hidden, queries)}
        found = {
            "qkv": (sum(weight.rows for weight in self.qkv), hidden),
            "output": (self.output.rows, self.output.cols),
        }
        if self.router is None:
            check_weights((self.gate, self.up))
            inner = self.gate.rows
            expected |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            found |= {name: (getattr(self, name).rows, getattr(self, name).cols) for name in ("gate", "up", "down")}
        else:
            check_matrix("router.weight", self.router.weight, (self.router.num_experts, hidden))
            check_experts(self.gate, self.up, self.down, num_experts=self.router.num_experts)
            if self.activation != "silu":
                raise ConfigError.of("activation", self.activation, "silu, which experts have")
        if found != expected:
            raise ConfigError.of("shapes of a layer's weights", found, str(expected))
        if len(self.qkv) not in (1, 3) or len(self.qkv_biases) != len(self.qkv):
            raise ConfigError.of("qkv", len(self.qkv), "one or three weights, and as many biases")


class NativeDecoder:
    """Decoder layers whose whole step is one native call in one parallel region.

    :param workspace: of the engine that calls; one call at a time
    :raises ConfigError: shapes do not fit
    """

    def __init__(self, workspace: Workspace, layers: Sequence[DecoderLayer]) -> None:
        self.hidden_size = layers[0].qkv[0].cols
        self._workspace = workspace
        self._layers = tuple(layers)
        self._head_dim = min(layer.shape.head_dim for layer in layers)
        self._kept: list[Tensor | None] = []  # what the C structures point to, beside the layers' own
        self._table = (Layer * len(layers))()
        for target, layer in zip(self._table, layers, strict=True):
            self._describe(target, layer)
        self._args = Decoder(
            layers=addressof(self._table),
            num_layers=len(layers),
            workspace=workspace.handle,
            num_threads=workspace.num_threads,
        )

    def _describe(self, target: Layer, layer: DecoderLayer) -> None:
        hidden, size = self.hidden_size, layer.shape.head_dim
        for matrix, weight, bias in zip(target.qkv, layer.qkv, layer.qkv_biases, strict=False):
            vector = float_vector("bias", bias, weight.rows)
            self._kept.append(vector)
            describe(matrix, weight, vector)
        for name in ("output", "gate", "up", "down"):
            describe(getattr(target, name), getattr(layer, name), None)
        if (router := layer.router) is not None:
            target.router.weight, target.router.dtype = router.weight.data_ptr(), DTYPES[router.weight.dtype]
            target.router.num_experts, target.router.num_selected = router.num_experts, router.num_selected
            target.router.renormalize = router.renormalize
        for name, length in (
            ("attention_norm", hidden),
            ("mlp_norm", hidden),
            ("query_norm", size),
            ("key_norm", size),
        ):
            vector = float_vector(name, getattr(layer, name), length)
            self._kept.append(vector)
            setattr(target, name, pointer(vector))
        target.heads = describe_heads(layer.shape, layer.cache)
        target.cache = describe_cache(layer.cache)
        target.num_qkv = len(layer.qkv)
        target.activation = ACTIVATIONS[layer.activation]
        target.norm_eps = layer.norm_eps

    def __call__(self, hidden: Tensor, cosines: Tensor, sines: Tensor, slots: Tensor, batch: VarlenBatch) -> Tensor:
        """Run every layer.

        :param hidden: [num_tokens, hidden] float32, contiguous; changed in place
        :param cosines: [num_tokens, n] float32, contiguous: rotation of elements i and n + i of each head; n is half a
            head at most
        :param sines: likewise
        :param slots: [num_tokens] int64: where the tokens' keys and values go, ``block * block_size + offset``
        :param batch: whose contexts include the new tokens
        :returns: ``hidden``
        :raises ConfigError: shapes or dtypes do not fit
        """
        num_tokens = hidden.shape[0]
        half = cosines.shape[-1]
        if 2 * half > self._head_dim:
            raise ConfigError.of("cosines.shape", tuple(cosines.shape), f"at most {self._head_dim} / 2 columns")
        for name, tensor, shape, dtype in (
            ("hidden", hidden, (num_tokens, self.hidden_size), torch.float32),
            ("cosines", cosines, (num_tokens, half), torch.float32),
            ("sines", sines, (num_tokens, half), torch.float32),
            ("slots", slots, (num_tokens,), torch.int64),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ConfigError.of(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {dtype} {shape}")
        args = self._args
        args.hidden, args.slots = hidden.data_ptr(), slots.data_ptr()
        args.cosines, args.sines, args.rotary_half = cosines.data_ptr(), sines.data_ptr(), half
        args.batch = describe_batch(batch)
        args.num_rows = num_tokens
        library = self._workspace.library
        if library.functions.paged_decoder(library.level, byref(args)):
            raise MemoryError("no memory for the scratch of native decoder layers")
        return hidden
