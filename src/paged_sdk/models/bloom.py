"""Read BLOOM: ALiBi instead of rotary positions, layer norms, also after the embeddings, and MLPs without a gate."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.alibi import alibi_slopes
from paged_sdk.models.common_config import own_heads, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.renamed(
        hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head"
    ).with_defaults(
        vocab_size=250_880, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, layer_norm_epsilon=1e-5
    )
    if fields.flag("apply_residual_connection_post_layernorm", False):
        raise fields.error("apply_residual_connection_post_layernorm", "false")
    fields = own_heads(fields, intermediate_size=4 * fields.positive("hidden_size"))
    # ALiBi has no largest position; the only length that configs state is that of training sequences.
    fields = fields.updated(ConfigFields({"max_position_embeddings": fields.positive("seq_length", 2048)}))
    shape = read_common(
        fields,
        ropes=(NO_ROPE,) * fields.positive("num_hidden_layers"),
        activation=Activation.GELU_TANH,
        tie_embeddings=True,
        eps="layer_norm_epsilon",
    )
    return evolve(
        shape,
        norm=NormKind.LAYER,
        norm_bias=True,
        embedding_norm=True,
        gated_mlp=False,
        qkv_groups=shape.num_heads,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        alibi_slopes=alibi_slopes(shape.num_heads),
    )


_NAMES = TensorNames(
    body="transformer.",
    embedding="word_embeddings",
    layers="h",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norms=NormNames(last="ln_f"),
)

# Tensor names of the released checkpoints have no prefix.
FAMILY = DecoderFamily(architectures=("BloomForCausalLM",), read=_read, names=(_NAMES, evolve(_NAMES, body="")))
