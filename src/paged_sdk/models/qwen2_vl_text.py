"""Read the text decoder of Qwen2-VL: Qwen 2 with rotary positions in time, height and width."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_head_dim
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.qwen2 import read_qwen_windows
from paged_sdk.models.rope_fields import read_rope, rope_section

__all__ = ["FAMILY", "read_qwen2_vl_text"]


def read_qwen2_vl_text(fields: ConfigFields) -> DecoderConfig:
    """Read the shape of the text decoder.

    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=32_768, rms_norm_eps=1e-5)
    section = rope_section(fields)
    rope = read_rope(
        fields,
        section,
        head_dim=read_head_dim(fields),
        default_theta=1_000_000.0,
        aliases={"mrope": "default"},
    )
    sections = section.integers("mrope_section") or (16, 24, 24)
    if sum(sections) != rope.rotary_dim // 2 or len(sections) != 3:
        raise section.error("mrope_section", f"three numbers that add up to {rope.rotary_dim // 2}")
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    num_layers = fields.positive("num_hidden_layers")
    shape = read_common(
        fields,
        ropes=(evolve(rope, axis_of_frequency=axes),) * num_layers,
        sliding_windows=read_qwen_windows(fields),
    )
    return evolve(shape, qkv_bias=True)


FAMILY = DecoderFamily(
    architectures=("Qwen2VLTextModel",),
    read=read_qwen2_vl_text,
    sizes=Sizes(vocab=152_064, hidden=8192, mlp=29_568, layers=80, heads=64),
)
