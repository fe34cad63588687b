"""Read StarCoder 2: llama with layer norms, biases everywhere and MLPs without a gate."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.models.common_config import read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=2, max_position_embeddings=4096, norm_epsilon=1e-5)
    has_bias = fields.flag("use_bias", True)
    return evolve(
        read_common(
            fields,
            sliding_windows=(fields.optional_positive("sliding_window"),) * fields.positive("num_hidden_layers"),
            activation=read_activation(fields, "hidden_act", Activation.GELU_TANH),
            tie_embeddings=True,
            eps="norm_epsilon",
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


FAMILY = DecoderFamily(
    architectures=("Starcoder2ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=49_152, hidden=3072, mlp=12_288, layers=30, heads=24),
    names=(TensorNames(up="mlp.c_fc", down="mlp.c_proj"),),
)
