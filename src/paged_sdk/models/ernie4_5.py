"""Read Ernie 4.5: llama with interleaved rotary embedding."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "read_ernie4_5"]


def _read(fields: ConfigFields) -> DecoderConfig:
    return read_ernie4_5(
        fields.with_defaults(num_key_value_heads=2, head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1e-5)
    )


def read_ernie4_5(fields: ConfigFields) -> DecoderConfig:
    """Read what Ernie 4.5 with and without experts have in common.

    :raises CheckpointError: a value is missing or invalid
    """
    rope = read_one_rope(fields, default_theta=500_000.0, interleaved=True)
    has_bias = fields.flag("use_bias", False)
    return evolve(
        read_common(fields, ropes=(rope,) * fields.positive("num_hidden_layers"), tie_embeddings=True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


FAMILY = DecoderFamily(
    architectures=("Ernie4_5ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=103_424, hidden=1024, mlp=3072, layers=18, heads=16),
)
