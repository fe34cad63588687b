"""Read GLM-4: llama with interleaved rotary embedding of half of each head."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY", "read_glm"]


def read_glm(fields: ConfigFields) -> DecoderConfig:
    """Read the fields that the first GLM-4 models and those of 2025 have in common."""
    fields = fields.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
    )
    rope = read_one_rope(fields, is_partial=True, interleaved=True)
    return evolve(
        read_common(fields, ropes=(rope,) * fields.positive("num_hidden_layers")),
        qkv_bias=fields.flag("attention_bias", True),
    )


FAMILY = DecoderFamily(
    architectures=("GlmForCausalLM",),
    read=read_glm,
    sizes=Sizes(vocab=151_552, hidden=4096, mlp=13_696, layers=40, heads=32),
    names=(TensorNames(gate_up=("mlp.gate_up_proj",)),),
)
