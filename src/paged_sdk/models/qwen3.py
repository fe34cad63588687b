"""Read Qwen 3: Qwen 2 with norms of queries and keys instead of biases."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.qwen2 import read_qwen_windows

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768)
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(fields, sliding_windows=read_qwen_windows(fields)),
        qk_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


FAMILY = DecoderFamily(
    architectures=("Qwen3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=4096, mlp=22_016, layers=32, heads=32),
)
