"""Read Falcon: an MLP without a gate, parallel to attention or after it, and one tensor for queries, keys and values,
grouped by KV head.
"""

from __future__ import annotations

import torch
from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.alibi import alibi_slopes
from paged_sdk.models.common_config import own_heads, read_activation, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.renamed(hidden_size="n_embed").with_defaults(
        vocab_size=65_024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        layer_norm_epsilon=1e-5,
    )
    is_new, num_heads = fields.flag("new_decoder_architecture", False), fields.positive("num_attention_heads")
    parallel, has_two_norms = fields.flag("parallel_attn", True), _has_two_norms(fields, is_new=is_new)
    if is_new and not parallel:
        raise fields.error("parallel_attn", "true beside new_decoder_architecture = true")
    num_kv_heads = fields.positive("num_kv_heads", num_heads)
    if is_new:
        if num_heads % num_kv_heads:
            raise fields.error("num_kv_heads", f"a divisor of num_attention_heads = {num_heads}")
    elif fields.flag("multi_query", True):
        num_kv_heads = 1
    elif num_kv_heads != num_heads:
        raise fields.error("num_kv_heads", f"num_attention_heads = {num_heads}, since multi_query = false")
    fields = own_heads(
        fields,
        intermediate_size=fields.positive("ffn_hidden_size", 4 * fields.positive("hidden_size")),
        num_kv_heads=num_kv_heads,
    )
    has_alibi, has_bias = fields.flag("alibi", False), fields.flag("bias", False)
    shape = read_common(
        fields,
        ropes=(NO_ROPE if has_alibi else read_one_rope(fields),) * fields.positive("num_hidden_layers"),
        activation=read_activation(fields, "activation", Activation.GELU),
        tie_embeddings=True,
        eps="layer_norm_epsilon",
    )
    return evolve(
        shape,
        norm=NormKind.LAYER,
        norm_bias=True,
        parallel_residual=parallel,
        parallel_norms=has_two_norms,
        gated_mlp=False,
        qkv_groups=num_kv_heads,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        alibi_slopes=_slopes(shape) if has_alibi else (),
    )


def _has_two_norms(fields: ConfigFields, *, is_new: bool) -> bool:
    """Return whether attention and a parallel MLP have separate norms.

    :raises CheckpointError: the config has a combination that no model has
    """
    count = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if count not in ((1, 2) if is_new else (1,)):
        raise fields.error("num_ln_in_parallel_attn", "1, or 2 beside new_decoder_architecture = true")
    return count == 2


def _slopes(shape: DecoderConfig) -> tuple[float, ...]:
    """Return the slopes that the models were trained with: rounded to bfloat16, and multiplied by the score scale."""
    rounded: list[float] = torch.tensor(alibi_slopes(shape.num_heads), dtype=torch.float32).bfloat16().tolist()
    return tuple(slope * shape.attention_scale for slope in rounded)


FAMILY = DecoderFamily(
    architectures=("FalconForCausalLM",),
    read=_read,
    names=(
        TensorNames(
            body="transformer.",
            embedding="word_embeddings",
            layers="h",
            qkv=("self_attention.query_key_value",),
            output="self_attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            norms=NormNames(last="ln_f"),
        ),
    ),
)
