"""Describe the shape of a decoder-only transformer, as the shared blocks understand it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from attrs import evolve, frozen

__all__ = [
    "NO_ROPE",
    "Activation",
    "DecoderConfig",
    "MoeConfig",
    "NormKind",
    "QkNormWeights",
    "RopeConfig",
    "RopeKind",
]


class Activation(Enum):
    """Names the non-linearity of an MLP, by Hugging Face's names."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    QUICK_GELU = "quick_gelu"
    RELU = "relu"
    RELU2 = "relu2"
    RELU6 = "relu6"
    LEAKY_RELU = "leaky_relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    MISH = "mish"
    HARDSWISH = "hardswish"
    LINEAR = "linear"


class NormKind(Enum):
    """Says what norms divide by, and whether they take the mean off before."""

    RMS = "rms"
    LAYER = "layer"


class QkNormWeights(Enum):
    """Says which weights norms of queries and keys have: one vector for all heads, one for each head, or one norm for
    all heads at once.
    """

    SHARED = "shared"
    OWN = "own"
    WHOLE = "whole"


class RopeKind(Enum):
    """Says how rotary frequencies are scaled beyond the context that a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@frozen(kw_only=True)
class RopeConfig:
    """Describes the rotary embedding of one kind of layer, by the names of Hugging Face's ``rope_scaling`` keys.

    :ivar rotary_dim: leading elements of each head that are rotated (even, <= head_dim)
    :ivar theta: base of the frequencies
    :ivar factor: context extension
    :ivar original_max_position: tokens of context that the model was trained on: llama3, yarn and longrope need it
    :ivar attention_factor: multiplies cos and sin; None: the kind's own formula
    :ivar gguf_attn_factor: multiplies cos and sin once more, whatever the kind (GGUF's attn_factor)
    :ivar axis_of_frequency: one entry per frequency: by which of a token's positions it turns, 0 in time, 1 in height
        or 2 in width (Wang et al., 2024, arXiv 2409.12191); empty: a token has one position
    :ivar short_factor: longrope, one divisor per frequency up to ``original_max_position`` tokens
    :ivar long_factor: longrope, one divisor per frequency beyond that
    :ivar inv_freq_divisors: one divisor per frequency, before the kind's own formula (GGUF's rope_freqs)
    :ivar interleaved: element 2i of a head is paired with element 2i + 1, not element i with one half the rotated
        elements further on (glm, cohere)
    :ivar rotates: False: nothing is rotated, whatever the other settings say (:data:`NO_ROPE`)
    """

    rotary_dim: int
    theta: float = 10_000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    gguf_attn_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    inv_freq_divisors: tuple[float, ...] = ()
    interleaved: bool = False
    rotates: bool = True
    axis_of_frequency: tuple[int, ...] = ()

    @property
    def switch(self) -> int | None:
        """Return the length of a text beyond which other frequencies rotate all of it; None: there is no such
        length.
        """
        switches = self.kind is RopeKind.LONGROPE and self.short_factor != self.long_factor
        return self.original_max_position if switches else None


# Two elements turned by no angle: every kernel computes it, and those that need at least one frequency have one.
NO_ROPE: Final = RopeConfig(rotary_dim=2, rotates=False)
"""The rotary embedding of layers that know no positions."""


@frozen(kw_only=True)
class MoeConfig:
    """Describes layers whose MLP is many experts, each token using a few (Shazeer et al., 2017, arXiv 1701.06538).

    :ivar layers: which layers, by index; the others have one MLP for all tokens
    :ivar num_experts_per_token: how many of a layer's ``num_experts`` each token uses
    :ivar intermediate_size: the intermediate size of one expert
    :ivar shared_intermediate_size: the intermediate size of one more expert, which serves every token and whose output
        is weighed by a gate of its own (qwen2_moe); None: there is none
    :ivar sparse_mixer: two experts are chosen, each weighed by a softmax over those whose scores are near its own: the
        share by which they may be less (phimoe); ``renormalize`` does not count then
    :ivar has_biases: whether the router and all experts add biases (gpt-oss)
    :ivar swiglu_limit: experts compute ``(up + 1) * gate * sigmoid(swiglu_alpha * gate)`` with both clamped to it, the
        gate from above only (gpt-oss); None: ``up * silu(gate)``
    :ivar alternates: whether checkpoints that have all experts in one tensor have gate and up in turns, row by row
    :ivar renormalize: True: the weights of a token's experts are scaled to add up to 1; False: they are the softmax's
        over all experts
    """

    layers: frozenset[int]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    shared_intermediate_size: int | None = None
    sparse_mixer: float | None = None
    has_biases: bool = False
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    alternates: bool = False


@frozen(kw_only=True)
class DecoderConfig:
    """Describes a decoder-only transformer made of the shared blocks.

    Per-layer settings have one entry per layer, so that a block never asks which family it belongs to.

    :ivar model_type: Hugging Face's ``model_type``, which is also the name of the file in ``models/``
    :ivar sliding_windows: per layer: tokens that a query attends to, itself included; None: all
    :ivar ropes: per layer: its rotary embedding (layers of one kind share one value)
    :ivar attention_scale: multiplies q.k
    :ivar attention_sinks: whether each head's softmax has one more logit, a learned one without a value (gpt-oss)
    :ivar alibi_slopes: per head: what a key's score loses for each token between it and the query (Press et al., 2021,
        arXiv 2108.12409); empty: nothing
    :ivar attention_softcap: scores become ``cap * tanh(score / cap)``
    :ivar logit_softcap: the same for the logits
    :ivar logit_scale: multiplies the logits, before their cap (cohere, granite)
    :ivar embedding_scale: multiplies the token embeddings (gemma)
    :ivar embedding_norm: whether the token embeddings are normalized before the first layer (bloom)
    :ivar residual_scale: multiplies what attention and the MLP add to the residual stream (granite)
    :ivar norm: of all norms, those of queries and keys included
    :ivar norm_bias: whether norms of layers, and the last one, add a bias
    :ivar norm_offset: added to the weights of norms (1 for gemma)
    :ivar norm_in_float32: whether the product with a norm's weight is rounded once, not the normalized vector too
    :ivar gated_mlp: False: MLPs are ``down(activation(up(x)))``
    :ivar qk_norm: whether queries and keys are normalized; ``qk_norm_weights`` and ``qk_norm_bias`` say how
    :ivar input_norms: norms before attention and before the MLP (all but olmo2 and its kin)
    :ivar sandwich_norms: norms after attention and after the MLP, before the residual (gemma)
    :ivar parallel_residual: attention and the MLP read the same normalized rows, and what both give is added at once
    :ivar parallel_norms: each of the two has a norm of its own there (falcon)
    :ivar qkv_groups: in how many groups of rows, each with its queries, keys and values, a checkpoint has them in one
        tensor (codegen: 4)
    :ivar qkv_values_first: whether values come before keys there (codegen)
    :ivar qkv_clip: the largest magnitude of elements of queries, keys and values, after their norms (olmoe)
    :ivar head_bias: whether the output projection adds a bias
    :ivar moe: mixture of experts; None: every layer has one MLP
    :ivar bidirectional: whether tokens attend to later ones too, a window's worth of them: an encoder
    :ivar num_image_layers: after how many of the first layers vectors of images are added to the residual stream
        (Qwen3-VL's DeepStack: Meng et al., 2024, arXiv 2406.04334)
    :ivar max_position: tokens of context
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    ropes: tuple[RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    attention_scale: float
    alibi_slopes: tuple[float, ...] = ()
    attention_softcap: float | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    logit_scale: float | None = None
    embedding_scale: float | None = None
    embedding_norm: bool = False
    residual_scale: float | None = None
    activation: Activation = Activation.SILU
    gated_mlp: bool = True
    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    qkv_bias: bool = False
    qkv_groups: int = 1
    qkv_values_first: bool = False
    qkv_clip: float | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    qk_norm_weights: QkNormWeights = QkNormWeights.SHARED
    qk_norm_bias: bool = False
    input_norms: bool = True
    sandwich_norms: bool = False
    parallel_residual: bool = False
    parallel_norms: bool = False
    tie_embeddings: bool = False
    moe: MoeConfig | None = None
    num_image_layers: int = 0
    bidirectional: bool = False

    @property
    def rope_switch(self) -> int | None:
        """Return the length of a text beyond which its keys are rotated otherwise, the earlier ones too; None: there is
        no such length.
        """
        # A config whose layers switch at different lengths is refused.
        return next((rope.switch for rope in self.ropes if rope.switch is not None), None)

    @property
    def kv_elements_per_token(self) -> int:
        """Return the KV elements per token over all layers, E of the pool-size formula."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def of_layers(self, layers: Sequence[int]) -> DecoderConfig:
        """Return the shape of some of the layers alone, as what keeps their keys and values takes it."""
        if list(layers) == list(range(self.num_layers)):
            return self
        return evolve(
            self,
            num_layers=len(layers),
            ropes=tuple(self.ropes[layer] for layer in layers),
            sliding_windows=tuple(self.sliding_windows[layer] for layer in layers),
        )

    @property
    def window(self) -> int | None:
        """Return the widest sliding window, beyond which no KV is read again; None if any layer attends to
        everything, or tokens to later ones.
        """
        if self.bidirectional:
            return None
        widths = [width for width in self.sliding_windows if width is not None]
        return max(widths) if widths and len(widths) == len(self.sliding_windows) else None
