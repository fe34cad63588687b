"""Read Seed-OSS: llama with biases of queries, keys and values."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=8, head_dim=128, max_position_embeddings=524_288)
    return evolve(
        read_common(fields),
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("SeedOssForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=155_136, hidden=4096, mlp=27_648, layers=64, heads=80),
)
