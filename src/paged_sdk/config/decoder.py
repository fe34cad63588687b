"""Describe the shape of a decoder-only transformer built from the shared blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import evolve, frozen

from paged_sdk.config.activation import Activation
from paged_sdk.config.assistant import AssistantConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.layer_shape import LayerInputConfig, LayerShape
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.recurrent import RecurrentConfig
from paged_sdk.config.rope import RopeConfig

__all__ = [
    "AttentionGate",
    "BranchScales",
    "DecoderConfig",
    "LayerParts",
    "NormKind",
    "QkNormWeights",
]


class NormKind(Enum):
    """Names the kind of norms: RMSNorm, or LayerNorm, which also subtracts the mean."""

    RMS = "rms"
    LAYER = "layer"


class QkNormWeights(Enum):
    """Says how queries and keys are normalized: per head with one weight vector shared by all heads, per head with a
    weight vector for each, or over all heads together.
    """

    SHARED = "shared"
    OWN = "own"
    WHOLE = "whole"


class AttentionGate(Enum):
    """Says where the gates of attention come from: the query projection, which computes for each head its query, then
    its gate, or a projection of their own.
    """

    WITH_QUERIES = "with queries"
    APART = "apart"


class LayerParts(Enum):
    """Says what a layer has: what mixes tokens, an MLP, or both."""

    BOTH = "both"
    MIXER = "mixer"
    MLP = "mlp"


@frozen(kw_only=True)
class BranchScales:
    """Holds factors of vectors within the layers (falcon_h1): what other models have in their weights.

    :ivar attention_input: multiplies the input of queries, keys and values; keys are multiplied by ``key``, too
    :ivar attention_output: multiplies attention's output
    :ivar gate: multiplies the MLP's gate before the activation
    :ivar mlp_output: multiplies the MLP's output
    """

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    gate: float = 1.0
    mlp_output: float = 1.0


@frozen(kw_only=True)
class DecoderConfig:
    """Describes a decoder-only transformer made of the shared blocks.

    Families differ only in these values: no block asks which family it belongs to.

    :ivar model_type: Hugging Face's ``model_type``, which is also the name of the file in ``models/``
    :ivar num_kv_heads: number of heads of keys and of values in each layer, unless :attr:`layer_shapes` says otherwise;
        ``head_dim`` and ``intermediate_size`` likewise. What depends on the layer asks :meth:`layer`
    :ivar layer_shapes: the sizes of each layer, if they differ; empty: all layers have the model's
    :ivar sliding_windows: per layer: number of tokens that a query attends to, itself included; None: all
    :ivar ropes: per layer: its rotary embedding
    :ivar attention_scale: multiplies q.k
    :ivar attention_sinks: whether each head's softmax has an extra learned logit without a value (gpt-oss)
    :ivar alibi_slopes: per head: subtracted from a key's score per token of distance to the query (ALiBi: Press et al.,
        2021, arXiv 2108.12409); empty: no ALiBi
    :ivar relative_biases: whether layers add learned numbers to scores, by the distance from query to key (T5)
    :ivar attention_softcap: scores become ``cap * tanh(score / cap)``
    :ivar logit_softcap: the same for the logits
    :ivar logit_scale: multiplies the logits, before the soft cap (cohere, granite)
    :ivar embedding_scale: multiplies the token embeddings (gemma)
    :ivar embedding_norm: whether the token embeddings are normalized before the first layer (bloom)
    :ivar residual_scale: multiplies the outputs of attention and the MLP before the residual addition (granite)
    :ivar norm: kind of all norms, including those of queries and keys
    :ivar norm_bias: whether the layers' norms and the final norm have biases
    :ivar norm_offset: added to the weights of norms (1 for gemma)
    :ivar norm_in_float32: True: norms multiply by the weight in float32 and round once; False: they round the
        normalized vector to the model's dtype before the multiplication
    :ivar gated_mlp: False: MLPs are ``down(activation(up(x)))``
    :ivar qk_norm: whether queries and keys are normalized, as ``qk_norm_weights`` and ``qk_norm_bias`` specify
    :ivar value_norm: whether values are normalized by an RMSNorm without weights, each head by itself (gemma4)
    :ivar qk_norm_after_rope: whether queries and keys are normalized after their rotation (hunyuan)
    :ivar input_norms: norms before attention and before the MLP (all but olmo2 and its kin)
    :ivar sandwich_norms: norms after attention and after the MLP, before the residual (gemma)
    :ivar parallel_residual: attention and the MLP read the same input, and both outputs are added to the residual at
        once
    :ivar parallel_norms: with ``parallel_residual``: attention and the MLP have separate input norms (falcon)
    :ivar qkv_groups: number of groups of rows in a checkpoint's fused QKV tensor, each with its own queries, keys and
        values (codegen: 4)
    :ivar qkv_values_first: whether the values of a group precede its keys (codegen)
    :ivar qkv_clip: queries, keys and values are clamped to this magnitude, after their norms (olmoe)
    :ivar attention_gate: where the gates come from whose sigmoids multiply attention's output (qwen3_next, afmoe);
        None: there are none
    :ivar layer_scales: whether the residual stream is multiplied by a learned number after each layer (gemma4)
    :ivar layer_inputs: what each layer adds of a token besides its embedding (gemma4); None: nothing
    :ivar assistant: what an assistant has besides the decoder, which drafts for another model; None: it is no assistant
    :ivar head_bias: whether the output projection has a bias
    :ivar moe: mixture-of-experts layers; None: every layer has a dense MLP
    :ivar recurrent: per layer: what it computes instead of attention; None: attention. Empty: every layer has attention
    :ivar recurrent_beside: whether layers compute attention beside what ``recurrent`` says, and add both (falcon_h1)
    :ivar parts: per layer: which of its parts it has (nemotron_h). Empty: every layer has both
    :ivar branch_scales: factors within the layers; None: none
    :ivar latent: latent attention in all layers: ``num_kv_heads`` is 1, ``head_dim`` is that of the key that is kept,
        and the key is also the value; None: keys and values are kept
    :ivar bidirectional: whether tokens also attend to later tokens, within the window (encoders)
    :ivar num_image_layers: number of first layers after which image vectors are added to the residual stream
        (DeepStack of Qwen3-VL: Meng et al., 2024, arXiv 2406.04334)
    :ivar max_position: context length in tokens
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
    relative_biases: bool = False
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
    attention_gate: AttentionGate | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    qk_norm_weights: QkNormWeights = QkNormWeights.SHARED
    qk_norm_bias: bool = False
    value_norm: bool = False
    qk_norm_after_rope: bool = False
    input_norms: bool = True
    sandwich_norms: bool = False
    parallel_residual: bool = False
    parallel_norms: bool = False
    tie_embeddings: bool = False
    moe: MoeConfig | None = None
    num_image_layers: int = 0
    recurrent: tuple[RecurrentConfig | None, ...] = ()
    recurrent_beside: bool = False
    parts: tuple[LayerParts, ...] = ()
    branch_scales: BranchScales | None = None
    latent: LatentAttentionConfig | None = None
    bidirectional: bool = False
    layer_shapes: tuple[LayerShape, ...] = ()
    layer_scales: bool = False
    layer_inputs: LayerInputConfig | None = None
    assistant: AssistantConfig | None = None

    def layer(self, index: int) -> LayerShape:
        """Return the sizes of a layer."""
        if self.layer_shapes:
            return self.layer_shapes[index]
        return LayerShape(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate_size
        )

    @property
    def rope_switch(self) -> int | None:
        """Return the sequence length beyond which all keys, earlier ones included, use other frequencies; None if
        frequencies never change.
        """
        # A config whose layers switch at different lengths is refused.
        return next((rope.switch for rope in self.ropes if rope.switch is not None), None)

    @property
    def kv_elements_per_token(self) -> int:
        """Return the KV elements per token over all layers: E in the pool-size formula of docs/architecture.md."""
        vectors = 1 if self.values_are_keys else 2
        return vectors * sum(each.num_kv_heads * each.head_dim for each in map(self.layer, self.kv_layers))

    @property
    def kv_vectors_per_token(self) -> int:
        """Return the keys and values that are kept per token, over all layers and KV heads."""
        return (1 if self.values_are_keys else 2) * sum(self.layer(index).num_kv_heads for index in self.kv_layers)

    @property
    def values_are_keys(self) -> bool:
        """Return whether a layer keeps only keys, which are its values, too."""
        return self.latent is not None

    @property
    def key_only(self) -> int:
        """Return the number of first elements of keys that are no part of the values, where keys are also the values:
        the rotated ones.
        """
        return 0 if self.latent is None else self.latent.rope_dim

    @property
    def head_dims(self) -> frozenset[int]:
        """Return the sizes of heads that the layers with attention have."""
        return frozenset(self.layer(index).head_dim for index in self.attention_layers)

    @property
    def attention_layers(self) -> Sequence[int]:
        """Return the indices of the layers with attention."""
        if (not self.recurrent or self.recurrent_beside) and not self.parts:
            return range(self.num_layers)
        return [layer for layer in range(self.num_layers) if self.has_mixer(layer) and self._has_attention(layer)]

    def has_mixer(self, layer: int) -> bool:
        """Return whether a layer mixes tokens, by attention or recurrently."""
        return not self.parts or self.parts[layer] is not LayerParts.MLP

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return not self.parts or self.parts[layer] is not LayerParts.MIXER

    def _has_attention(self, layer: int) -> bool:
        return self.recurrent_beside or not self.recurrent or self.recurrent[layer] is None

    @property
    def kv_layers(self) -> Sequence[int]:
        """Return the indices of the layers that keep keys and values: those with attention, except over another
        layer's.
        """
        return [layer for layer in self.attention_layers if self.layer(layer).keeps_kv]

    def kv_layer(self, index: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or an earlier one."""
        source = self.layer(index).kv_layer
        return index if source is None else source

    @property
    def recurrent_layers(self) -> dict[int, RecurrentConfig]:
        """Return the layers that keep a state per sequence, by index."""
        return {layer: each for layer, each in enumerate(self.recurrent) if each is not None}

    def of_layers(self, layers: Sequence[int]) -> DecoderConfig:
        """Return the shape restricted to some layers, for KV storage that holds only these. ``moe`` is unchanged.

        :param layers: among them every layer to whose keys and values one of them attends
        """
        if list(layers) == list(range(self.num_layers)):
            return self
        recurrent = tuple(self.recurrent[layer] for layer in layers) if self.recurrent else ()
        places: dict[int | None, int | None] = {None: None, **{layer: place for place, layer in enumerate(layers)}}
        shapes = [self.layer_shapes[layer] for layer in layers] if self.layer_shapes else []
        return evolve(
            self,
            num_layers=len(layers),
            layer_shapes=tuple(evolve(each, kv_layer=places[each.kv_layer]) for each in shapes),
            ropes=tuple(self.ropes[layer] for layer in layers),
            sliding_windows=tuple(self.sliding_windows[layer] for layer in layers),
            recurrent=recurrent if any(recurrent) else (),
            parts=tuple(self.parts[layer] for layer in layers) if self.parts else (),
        )

    @property
    def window(self) -> int | None:
        """Return the widest sliding window, beyond which KV is never read again; None if a layer has full attention or
        attention is bidirectional.
        """
        if self.bidirectional:
            return None
        windows = [self.sliding_windows[layer] for layer in self.attention_layers]
        widths = [width for width in windows if width is not None]
        return max(widths) if widths and len(widths) == len(windows) else None
