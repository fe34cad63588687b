"""Read Nemotron 3 and 4, and Minitron: layer norms that multiply by 1 + weight, and MLPs without a gate."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.models.common_config import read_activation, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(max_position_embeddings=4096, norm_eps=1e-5, partial_rotary_factor=0.5)
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(
            fields,
            ropes=(read_one_rope(fields, is_partial=True),) * fields.positive("num_hidden_layers"),
            activation=read_activation(fields, "hidden_act", Activation.RELU2),
            eps="norm_eps",
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        norm_offset=1.0,
        gated_mlp=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("NemotronForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=256_000, hidden=6144, mlp=24_576, layers=32, heads=48),
)
