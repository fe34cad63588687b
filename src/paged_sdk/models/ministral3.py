"""Read Ministral 3: mistral whose queries grow with their position beyond the context of the training."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import rope_section

__all__ = ["FAMILY"]

# Default of configs without settings of the rotary embedding.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262_144, rms_norm_eps=1e-5
    )
    if not rope_section(fields).values():
        fields = ConfigFields({**fields.values(), "rope_parameters": _ROPE})
    beta = rope_section(fields).number("llama_4_scaling_beta", 0.0)
    rope = evolve(read_one_rope(fields), query_scale_beta=beta)
    num_layers = fields.positive("num_hidden_layers")
    windows = (fields.optional_positive("sliding_window"),) * num_layers
    return read_common(fields, ropes=(rope,) * num_layers, sliding_windows=windows)


FAMILY = DecoderFamily(
    architectures=("Ministral3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=131_072, hidden=4096, mlp=14_336, layers=34, heads=32),
)
