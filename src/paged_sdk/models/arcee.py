"""Read Arcee's AFM: llama with squared-ReLU MLPs without a gate."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(fields, activation=read_activation(fields, "hidden_act", Activation.RELU2)),
        gated_mlp=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("ArceeForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_000, hidden=2560, mlp=18_432, layers=32, heads=32),
)
