"""Read Command R: attention and MLP in parallel after one layer norm; interleaved rotary embedding."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, NormKind, QkNormWeights
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "read_cohere"]


def read_cohere(fields: ConfigFields, *, default_theta: float) -> DecoderConfig:
    """Read the fields that Command R and Command R7B have in common."""
    fields = fields.with_defaults(max_position_embeddings=8192, layer_norm_eps=1e-5)
    rope = read_one_rope(fields, default_theta=default_theta, interleaved=True)
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(
            fields,
            ropes=(rope,) * fields.positive("num_hidden_layers"),
            tie_embeddings=True,
            eps="layer_norm_eps",
        ),
        norm=NormKind.LAYER,
        parallel_residual=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


def _read(fields: ConfigFields) -> DecoderConfig:
    return evolve(
        read_cohere(fields, default_theta=500_000.0),
        qk_norm=fields.flag("use_qk_norm", False),
        qk_norm_weights=QkNormWeights.OWN,
    )


FAMILY = DecoderFamily(
    architectures=("CohereForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=256_000, hidden=8192, mlp=22_528, layers=40, heads=64),
)
