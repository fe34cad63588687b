"""Read Helium: llama with interleaved rotary embedding, and norms that apply the weight before rounding."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8)
    rope = read_one_rope(fields, default_theta=100_000.0, interleaved=True)
    return evolve(
        read_common(fields, ropes=(rope,) * fields.positive("num_hidden_layers")),
        norm_in_float32=True,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("HeliumForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=48_000, hidden=2560, mlp=7040, layers=24, heads=20),
)
