"""Read Granite 3 and 4: llama with factors of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "with_multipliers"]


def _read(fields: ConfigFields) -> DecoderConfig:
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        with_multipliers(read_common(fields), fields),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def with_multipliers(shape: DecoderConfig, fields: ConfigFields) -> DecoderConfig:
    """Return a shape with the factors that all of Granite's families have.

    :raises CheckpointError: a value is invalid
    """
    return evolve(
        shape,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


FAMILY = DecoderFamily(
    architectures=("GraniteForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
