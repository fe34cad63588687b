"""Read GPT-J: attention and an MLP without a gate in parallel after one layer norm; interleaved rotary embedding of the
first part of each head.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.rope import RopeConfig
from paged_sdk.models.common_config import must_not_be_tied, own_heads, read_activation, read_common, read_head_dim
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY", "NAMES", "read_gptj"]

NAMES = TensorNames(
    body="transformer.",
    embedding="wte",
    layers="h",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    norms=NormNames(attention="ln_1", last="ln_f"),
)
"""Tensor names of checkpoints; CodeGen's differ in the projections to queries, keys and values."""


def read_gptj(fields: ConfigFields) -> DecoderConfig:
    """Read the fields that GPT-J and CodeGen have in common."""
    fields = fields.renamed(
        max_position_embeddings="n_positions",
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ).with_defaults(
        vocab_size=50_400,
        max_position_embeddings=2048,
        hidden_size=4096,
        num_attention_heads=16,
        num_hidden_layers=28,
        layer_norm_epsilon=1e-5,
    )
    must_not_be_tied(fields)
    fields = own_heads(fields, intermediate_size=fields.positive("n_inner", 4 * fields.positive("hidden_size")))
    rotary_dim, head_dim = fields.positive("rotary_dim", 64), read_head_dim(fields)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.error("rotary_dim", f"an even number up to the {head_dim} elements of a head")
    rope = RopeConfig(rotary_dim=rotary_dim, interleaved=True)
    return evolve(
        read_common(
            fields,
            ropes=(rope,) * fields.positive("num_hidden_layers"),
            activation=read_activation(fields, "activation_function", Activation.GELU_TANH),
            eps="layer_norm_epsilon",
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        parallel_residual=True,
        gated_mlp=False,
        mlp_bias=True,
        head_bias=True,
    )


FAMILY = DecoderFamily(architectures=("GPTJForCausalLM",), read=read_gptj, names=(NAMES,))
