"""Read Llama 2 and 3, and the many models of their shape (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    has_bias = fields.flag("attention_bias", False)
    return evolve(read_common(fields), qkv_bias=has_bias, output_bias=has_bias, mlp_bias=fields.flag("mlp_bias", False))


FAMILY = DecoderFamily(
    architectures=("LlamaForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
