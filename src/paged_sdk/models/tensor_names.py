"""Name the tensors of a family's checkpoints."""

from __future__ import annotations

from typing import Final

from attrs import frozen

__all__ = ["NUMBERED_MTP", "AssistantNames", "ExpertNames", "MtpNames", "NormNames", "TensorNames"]


@frozen(kw_only=True)
class ExpertNames:
    """Names the tensors of a mixture of experts in a checkpoint.

    :ivar block: prefix, within a layer, of the router and of ``experts``
    :ivar router: name of the router's matrix within the block
    :ivar choice_bias: name of what is added to the experts' weights when they are chosen, within the block
    :ivar gate: name of the gate's matrix within an expert, if it has one; ``up`` and ``down`` likewise
    :ivar stacked: tensors that hold gate and up (or up alone), and down, of all experts, within the block
    :ivar latent: matrices that map to the vectors that experts read, and from those that they write, within the block
    :ivar shared_gate_up: gate and up projections of the shared experts, within a layer; a single name is a fused
        projection, or that of up, of experts without gates
    :ivar shared_down: down projection of the shared experts, within a layer
    :ivar shared_gate: what scales their output, within a layer
    """

    block: str = "mlp"
    router: str = "gate"
    choice_bias: str = "expert_bias"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


@frozen(kw_only=True)
class NormNames:
    """Names the norms of a model in a checkpoint.

    :ivar attention: norm before attention, within a layer
    :ivar attention_output: norm after attention, before the residual addition
    :ivar mlp: norm before the MLP, which llama names after the preceding attention
    :ivar mlp_output: norm after the MLP, before the residual addition
    :ivar query: norm of queries; ``key`` likewise
    :ivar beside: norms before attention and before an MLP in parallel to it
    :ivar embedding: norm after the embeddings, within the body
    :ivar last: norm before the output projection, within the body
    """

    attention: str = "input_layernorm"
    attention_output: str = "post_attention_layernorm"
    mlp: str = "post_attention_layernorm"
    mlp_output: str = "post_feedforward_layernorm"
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    beside: tuple[str, str] = ("ln_attn", "ln_mlp")
    embedding: str = "word_embeddings_layernorm"
    last: str = "norm"


@frozen(kw_only=True)
class MtpNames:
    """Names the tensors of a layer for multi-token prediction in a checkpoint.

    :ivar layer: prefix of the tensors that every layer has; None: that of the layer after the model's own, which begins
        the other names, too
    :ivar embedding_norm: norm of the embedding of the token after; ``hidden_norm`` of the hidden state likewise
    :ivar projection: matrix that makes the layer's input of both, the embedding first
    :ivar last_norm: norm before the output projection, which is the model's
    :ivar embedding: embeddings of its own, with which no such layer is known here
    """

    layer: str | None = "mtp.layers.0."
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    projection: str = "mtp.fc"
    last_norm: str = "mtp.norm"
    embedding: str = "mtp.embed_tokens"

    def after(self, prefix: str) -> MtpNames:
        """Return the whole names.

        :param prefix: of the layer after the model's own
        """
        if self.layer is not None:
            return self
        own = self.embedding_norm, self.hidden_norm, self.projection, self.last_norm
        embedding_norm, hidden_norm, projection, last_norm = (f"{prefix}{name}" for name in own)
        return MtpNames(
            layer=prefix,
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            projection=projection,
            last_norm=last_norm,
        )


NUMBERED_MTP: Final = MtpNames(
    layer=None, embedding_norm="enorm", hidden_norm="hnorm", projection="eh_proj", last_norm="shared_head.norm"
)
"""Names of such a layer that is numbered like the model's own (DeepSeek, GLM)."""


@frozen(kw_only=True)
class AssistantNames:
    """Names the tensors that an assistant has besides its decoder's.

    :ivar input: projection of the target's embeddings and hidden states
    :ivar output: projection of its hidden states to the target's size
    :ivar centroids: of clusters of tokens
    :ivar order: the tokens of all clusters
    """

    input: str = "pre_projection"
    output: str = "post_projection"
    centroids: str = "masked_embedding.centroids"
    order: str = "masked_embedding.token_ordering"

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return how these tensors' names begin."""
        return f"{self.input}.", f"{self.output}.", f"{self.centroids}.", self.order


@frozen(kw_only=True)
class TensorNames:
    """Names the tensors of a model in a checkpoint.

    :ivar body: prefix of the decoder's tensors
    :ivar embedding: token embeddings, within the body
    :ivar layers: prefix of the numbered layers, within the body
    :ivar head: output projection, unless tied to the embeddings
    :ivar qkv: projections to queries, keys and values, within a layer; a single name is a fused projection, whose order
        of rows the config states
    :ivar output: output projection of attention, within a layer
    :ivar attention_gate: projection to the gates of attention, within a layer, if they have one of their own
    :ivar recurrent: prefix, within a layer, of what a layer has instead of attention
    :ivar gate_up: gate and up projections of a gated MLP, within a layer; a single name is a fused projection
    :ivar up: first projection of an MLP without a gate
    :ivar down: last projection of an MLP
    :ivar activation: prefix of the numbers of a learned activation, within a layer
    :ivar layer_inputs: within the body, the second table of embeddings, the projection of embeddings beside it, and its
        norm (:class:`~paged_sdk.config.layer_shape.LayerInputConfig`)
    :ivar latent_up: projection of latent vectors to keys and values, within a layer
    :ivar experts: possible names of mixtures of experts; the first whose router is in the checkpoint are used. Routers
        are kept in the model's dtype, too
    :ivar mtp: possible names of the layer for multi-token prediction; none: nothing here reads such a layer
    :ivar unused: prefixes of tensors that belong neither to the decoder nor to an image encoder
    """

    body: str = "model."
    embedding: str = "embed_tokens"
    layers: str = "layers"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    attention_gate: str = "self_attn.gate_proj"
    recurrent: str = "linear_attn"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    norms: NormNames = NormNames()
    layer_inputs: tuple[str, str, str] = (
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
    )
    latent_up: str = "self_attn.kv_b_proj"
    experts: tuple[ExpertNames, ...] = (ExpertNames(),)
    mtp: tuple[MtpNames, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """Return the name of the token embeddings' tensor."""
        return f"{self.body}{self.embedding}.weight"

    def layer(self, index: int) -> str:
        """Return the prefix of one layer's tensor names."""
        return f"{self.body}{self.layers}.{index}."

    def layer_of(self, name: str) -> int | None:
        """Return the index of the layer that a tensor belongs to; None: it belongs to none."""
        start = f"{self.body}{self.layers}."
        number = name.removeprefix(start).partition(".")[0]
        return int(number) if name.startswith(start) and number.isdecimal() else None

    def is_decoded(self, name: str) -> bool:
        """Return whether a layer's matrix is kept in the model's dtype, whatever the others are quantized to."""
        return name.endswith(tuple(f".{each.block}.{each.router}.weight" for each in self.experts))

    def is_decoders(self, name: str) -> bool:
        """Return whether a tensor belongs to the decoder; a checkpoint may hold an image encoder, too."""
        parts = (self.embedding, self.layers, self.norms.embedding, self.norms.last, *self.layer_inputs)
        return name.startswith((f"{self.head}.", *(f"{self.body}{part}." for part in parts)))

    def is_encoders(self, name: str) -> bool:
        """Return whether a tensor belongs to an image encoder beside the decoder."""
        return not self.is_decoders(name) and not name.startswith(self.unused)
