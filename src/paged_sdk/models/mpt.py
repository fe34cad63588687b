"""Read MPT: ALiBi instead of rotary positions, layer norms, MLPs without a gate, and no biases."""

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
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ).with_defaults(
        vocab_size=50_368,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        layer_norm_epsilon=1e-5,
    )
    attention = fields.section("attn_config")
    _check(fields, attention)
    fields = own_heads(fields, intermediate_size=4 * fields.positive("hidden_size"))
    shape = read_common(
        fields,
        ropes=(NO_ROPE,) * fields.positive("num_hidden_layers"),
        activation=Activation.GELU,
        tie_embeddings=True,
        eps="layer_norm_epsilon",
    )
    return evolve(
        shape,
        norm=NormKind.LAYER,
        gated_mlp=False,
        attention_scale=attention.number("softmax_scale", shape.attention_scale),
        qkv_clip=attention.number("clip_qkv") if attention.is_set("clip_qkv") else None,
        alibi_slopes=alibi_slopes(shape.num_heads, attention.positive("alibi_bias_max", 8)),
    )


def _check(fields: ConfigFields, attention: ConfigFields) -> None:
    """Refuse settings that some models were trained with and that transformers does not implement.

    :raises CheckpointError: the config has such a setting
    """
    for section, key, wanted in (
        (attention, "alibi", True),
        (attention, "qk_ln", False),
        (attention, "prefix_lm", False),
        (fields, "no_bias", True),
    ):
        if section.flag(key, wanted) is not wanted:
            raise section.error(key, str(wanted).lower())
    if attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise attention.error("attn_type", "multihead_attention")
    if fields.text("norm_type", "layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise fields.error("norm_type", "layernorm or low_precision_layernorm")
    if fields.integer("expansion_ratio", 4) != 4:
        raise fields.error("expansion_ratio", "4")
    if fields.is_set("logit_scale"):
        raise fields.error("logit_scale", "none")


FAMILY = DecoderFamily(
    architectures=("MptForCausalLM",),
    read=_read,
    names=(
        TensorNames(
            body="transformer.",
            embedding="wte",
            layers="blocks",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            up="ffn.up_proj",
            down="ffn.down_proj",
            norms=NormNames(attention="norm_1", mlp="norm_2", last="norm_f"),
        ),
    ),
)
