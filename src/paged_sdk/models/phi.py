"""Read Phi 1, 1.5 and 2: attention and an MLP without a gate in parallel after one layer norm."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.models.common_config import must_not_be_tied, read_activation, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(layer_norm_eps=1e-5, partial_rotary_factor=0.5)
    must_not_be_tied(fields)
    return evolve(
        read_common(
            fields,
            ropes=(read_one_rope(fields, is_partial=True),) * fields.positive("num_hidden_layers"),
            activation=read_activation(fields, "hidden_act", Activation.GELU_TANH),
            eps="layer_norm_eps",
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        parallel_residual=True,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm=fields.flag("qk_layernorm", False),
        qk_norm_bias=True,
    )


_NAMES = TensorNames(
    output="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
    norms=NormNames(query="self_attn.q_layernorm", key="self_attn.k_layernorm", last="final_layernorm"),
)

FAMILY = DecoderFamily(
    architectures=("PhiForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=51_200, hidden=2048, mlp=8192, layers=24, heads=32),
    names=(_NAMES,),
)
