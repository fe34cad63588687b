"""Describes a decoder layer to the native library: its weights, its settings and its pages.

The basic layer is llama's: RMSNorm, attention with rotary embedding, residual; RMSNorm, gated MLP, residual. Options
cover other families: biases of any matrix (Qwen2, some Llamas), norms of query and key heads (Qwen3), norms of the
outputs of attention and MLP, in addition to those of the inputs (Gemma) or instead of them (OLMo 2), rotary embeddings
that differ between layers (Gemma 3) or are interleaved (GLM), layer norms and MLPs without a gate (StarCoder 2), an
activation with learned numbers (Apertus), gates of attention (AFMoE), latent attention (DeepSeek-V2), recurrences in
the place of attention (LFM2, Qwen 3.5, Granite 4), MLPs parallel to attention (Command R), experts in place of the MLP
(Mixtral) or beside it (Qwen2-MoE, Gemma 4), and layers of one part alone (Nemotron-H).
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native.latent_attention import LatentAttention
from paged_sdk.kernels.native.linear import check_weights
from paged_sdk.kernels.native.mixture import Mixture
from paged_sdk.kernels.native.paged_attention import AttentionShape
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.recurrent_layer import RecurrentMixing

__all__ = ["DecoderLayer", "LayerInput"]

_MOST_MATRICES: Final = 4


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

    A layer has attention or a recurrence in its place, and an MLP, experts or both; or one of the two parts alone.

    :ivar shape: the heads of attention; None: the layer has none. ``cache`` likewise
    :ivar qkv: query, key and value [.., hidden], or one fused matrix; without value with ``keys_as_values``, only query
        with ``shares_keys``, and with ``gates`` apart a last one to these; with ``latent`` one matrix, of queries or of
        the vector that they are projected from; with ``recurrent`` up to four matrices, of its inputs; empty: the layer
        is an MLP or experts alone
    :ivar latent: latent attention, with one key per token, ``shape.head_dim`` of its elements; None: other attention
    :ivar recurrent: what the layer has in the place of attention; None: attention, or nothing
    :ivar output: [hidden, num_heads * head_dim], or with ``latent`` [hidden, num_heads * value_dim], or with
        ``recurrent`` [hidden, its width]
    :ivar gate: of the MLP, [inner, hidden]; None: an MLP without a gate, whose activation is applied to ``up``
    :ivar up: [inner, hidden]; None: no MLP
    :ivar down: [hidden, inner]; None: no MLP
    :ivar mixture: experts, alone or beside the MLP; None: no experts
    :ivar norm: the kind of the norms before attention and MLP, and of shared head norms
    :ivar attention_norm: [hidden], weight of the norm before attention or what is in its place; None: no norm
    :ivar attention_norm_bias: [hidden], bias of a layer norm; None: no bias; other biases of norms likewise
    :ivar attention_output_norm: [hidden], weight of the RMSNorm of attention's output, before the residual addition;
        None: no norm
    :ivar mlp_norm: [hidden], weight of the norm before the MLP; None: no norm
    :ivar mlp_output_norm: [hidden], weight of the RMSNorm of the MLP's output; given if and only if
        ``attention_output_norm`` is
    :ivar head_norm: whether norms of queries and keys have one weight [head_dim] for all heads ("shared"), a weight per
        head ("own"), or normalize all heads as one vector ("whole")
    :ivar query_norm: weight of the norm of queries; None: no norm
    :ivar key_norm: likewise for keys
    :ivar norms_last: whether queries and keys are normalized after their rotation instead of before
    :ivar gates: whether ``qkv`` also projects to gates, [num_heads * head_dim], whose sigmoids multiply attention's
        output before ``output``: in a matrix of their own ("apart"), or in that of queries, after each head's query
        ("with queries"); None: no gates
    :ivar value_norm: whether each head's values are divided by their root mean square
    :ivar keys_as_values: whether values are the projected keys, before their norm and rotation
    :ivar shares_keys: whether the layer attends over keys and values that an earlier layer has written to ``cache``
    :ivar layer_input: what the layer adds of a token besides its embedding, with norms of outputs only; None: nothing
    :ivar scale: multiplies the residual stream after the layer, with norms of outputs only
    :ivar clip: limit of the magnitude of queries, keys and values; None: no limit
    :ivar sinks: [num_heads], an extra logit without a value in each head's softmax; None: no sinks
    :ivar activation: of the MLP's gate, or without a gate of ``up``
    :ivar xielu: [4], in place of ``activation`` of an MLP without a gate: xIELU's factors of the curves above and below
        0, its beta and its eps; None: ``activation``
    :ivar parallel: whether the MLP reads the same normalized input as attention, and both outputs are added at once
    :ivar rope: index of the layer's rotary embedding among the step's
    :ivar attended_widths: [num_ranks] int32: the columns of attention's output that each rank computes; they are
        gathered before ``output``, which has all columns and this rank's rows. None: ``output`` has this rank's columns
        and all rows, and its results are summed over ranks
    :ivar inner_widths: likewise for the input of ``down``
    :ivar hidden_widths: [num_ranks] int32: the rows of ``output``, and of ``down``, that each rank has in that case
    """

    shape: AttentionShape | None = None
    cache: LayerCache | None = None
    qkv: tuple[Projection, ...] = ()
    output: Projection | None = None
    latent: LatentAttention | None = None
    recurrent: RecurrentMixing | None = None
    gate: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    mixture: Mixture | None = None
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
    norms_last: bool = False
    gates: Literal["apart", "with queries"] | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    shares_keys: bool = False
    layer_input: LayerInput | None = None
    scale: float = 1.0
    norm_eps: float
    clip: float | None = None
    sinks: Tensor | None = None
    parallel: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    xielu: Tensor | None = None
    rope: int = 0
    attended_widths: Tensor | None = None
    inner_widths: Tensor | None = None
    hidden_widths: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        hidden = self.hidden_size
        self._check_norms()
        if self.parallel and (self.mixture is not None or self.mlp_norm is not None):
            raise ConfigError.of(
                "parallel", True, "False with experts, and with a norm before the feed-forward network"
            )
        if self.mlp_output_norm is None and (self.layer_input is not None or self.scale != 1.0):
            raise ConfigError.of("mlp_output_norm", None, "a norm, with a layer's own input or scale")
        expected, found = {}, {}
        if self.output is not None:
            projected, attended = self._check_mixer()
            expected["qkv"] = (projected, hidden)
            expected["output"] = self._last_shape(self.output.weight.rows, self.attended_widths, attended)
            found["qkv"] = (sum(each.weight.rows for each in self.qkv), hidden)
            found["output"] = self.output.shape
        elif self.qkv or self.parallel:
            raise ConfigError.of("output", None, "a matrix, with qkv and in parallel layers")
        if self.up is not None and self.down is not None:
            check_weights([each.weight for each in (self.gate, self.up) if each is not None])
            inner = self.up.weight.rows
            if hidden % 16 or inner % 16:
                raise ConfigError.of("hidden and inner size", (hidden, inner), "multiples of 16")
            expected |= {"gate": (inner, hidden), "up": (inner, hidden)}
            expected["down"] = self._last_shape(self.down.weight.rows, self.inner_widths, inner)
            found |= {"gate": (self.gate or self.up).shape, "up": self.up.shape, "down": self.down.shape}
        elif (self.gate, self.up, self.down) != (None, None, None):
            raise ConfigError.of("up and down", (self.up, self.down), "both, or no MLP")
        if self.xielu is not None and (self.up is None or self.gate is not None):
            raise ConfigError.of("xielu", "given", "none, but of an MLP without a gate")
        self._check_mixture()
        if (own := self.layer_input) is not None:
            if own.size % 16:
                raise ConfigError.of("layer_input.size", own.size, "a multiple of 16")
            expected |= {"input gate": (own.size, hidden), "input output": (hidden, own.size)}
            found |= {"input gate": own.gate.shape, "input output": own.output.shape}
        if found != expected:
            raise ConfigError.of("shapes of a layer's weights", found, str(expected))

    def _check_mixer(self) -> tuple[int, int]:
        """Check what mixes tokens; return the rows that its first matrices have together, and the elements of its
        result.
        """
        if self.recurrent is not None:
            return self._check_recurrent(self.recurrent)
        if self.shape is None or self.cache is None:
            raise ConfigError.of("shape and cache", (self.shape, self.cache), "both, with attention")
        if self.latent is not None:
            return self._check_latent(self.latent, self.shape, self.cache)
        return self._check_qkv(self.shape)

    def _check_recurrent(self, recurrent: RecurrentMixing) -> tuple[int, int]:
        """Check a recurrent layer; return like :meth:`_check_mixer`."""
        if self.shape is not None or self.cache is not None or self.latent is not None or self.parallel:
            raise ConfigError.of("recurrent", "given", "None, with attention and in parallel layers")
        if self.attended_widths is not None:
            raise ConfigError.of("recurrent", "given", "None, with columns of several ranks")
        check_weights([each.weight for each in self.qkv])
        if len(self.qkv) > _MOST_MATRICES:
            raise ConfigError.of("qkv", len(self.qkv), f"at most {_MOST_MATRICES} weights")
        recurrent.check(self.hidden_size)
        return recurrent.input_width, recurrent.width

    def _check_qkv(self, shape: AttentionShape) -> tuple[int, int]:
        """Check the number of matrices; return like :meth:`_check_mixer`."""
        check_weights([each.weight for each in self.qkv])
        of_heads = 1 if self.shares_keys else 2 if self.keys_as_values else 3
        num_matrices = of_heads + (1 if self.gates == "apart" else 0)
        if len(self.qkv) not in (1, num_matrices):
            raise ConfigError.of("qkv", len(self.qkv), f"one weight, or {num_matrices}")
        if self.gates == "with queries" and of_heads != 3:
            raise ConfigError.of("gates", self.gates, "None or apart, without keys and values of the layer's own")
        queries = shape.num_heads * shape.head_dim
        keys = (of_heads - 1) * shape.num_kv_heads * shape.head_dim
        return queries * (1 if self.gates is None else 2) + keys, queries

    def _check_latent(self, latent: LatentAttention, shape: AttentionShape, cache: LayerCache) -> tuple[int, int]:
        """Check latent attention; return like :meth:`_check_mixer`."""
        if len(self.qkv) != 1:
            raise ConfigError.of("qkv", len(self.qkv), "one weight, with latent attention")
        others = ("query_norm", "key_norm", "gates", "value_norm", "keys_as_values", "shares_keys", "clip", "parallel")
        if given := [name for name in others if getattr(self, name)]:
            raise ConfigError.of("latent", "given", f"None, with {' and '.join(given)}")
        if cache.key_offsets is not None or cache.basis is not None or cache.key.dtype is torch.uint8:
            raise ConfigError.of("cache", "offsets, a basis or 4-bit codes", "plain keys, with latent attention")
        (query,) = self.qkv
        latent.check(shape, query)
        return query.weight.rows, shape.num_heads * latent.value_dim(shape)

    def _check_norms(self) -> None:
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

    def _check_mixture(self) -> None:
        if (mixture := self.mixture) is None:
            if self.up is None and self.output is None:
                raise ConfigError.of("up", None, "an MLP or experts, in a layer without attention")
            return
        if mixture.hidden_size != self.hidden_size:
            raise ConfigError.of("mixture.hidden_size", mixture.hidden_size, str(self.hidden_size))
        if self.up is None and mixture.needs_mlp:
            raise ConfigError.of("mixture", "norms or a gate beside an MLP", "none without an MLP")
        count = mixture.choice.num_experts
        self._last_shape(mixture.down.weight.rows // count, mixture.inner_widths, mixture.up.weight.rows // count)

    @property
    def hidden_size(self) -> int:
        """Return the elements of the residual stream."""
        if self.qkv:
            return self.qkv[0].weight.cols
        if (first := self.gate or self.up) is not None:
            return first.weight.cols
        if self.mixture is not None:
            return self.mixture.hidden_size
        raise ConfigError.of("qkv", "none", "attention, an MLP or experts")

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
