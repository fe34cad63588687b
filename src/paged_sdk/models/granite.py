"""Read Granite 3 and 4: llama with factors of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "read_granite"]


def read_granite(fields: ConfigFields, ropes: tuple[RopeConfig, ...] | None = None) -> DecoderConfig:
    """Read what Granite with and without experts have in common.

    :param ropes: see :func:`~paged_sdk.models.common_config.read_common`
    :raises CheckpointError: a value is missing or invalid
    """
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(fields, ropes=ropes),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("GraniteForCausalLM",),
    read=read_granite,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
