"""Read the text decoder of Qwen3-VL: Qwen 3 with rotary positions in time, height and width."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_head_dim
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import interleaved_axes, read_rope, rope_section

__all__ = ["FAMILY", "read_qwen3_vl_text"]


def _read(fields: ConfigFields) -> DecoderConfig:
    return read_qwen3_vl_text(fields.with_defaults(num_key_value_heads=32, head_dim=128))


def read_qwen3_vl_text(fields: ConfigFields) -> DecoderConfig:
    """Read what the decoders with and without experts have in common.

    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(max_position_embeddings=128_000)
    section = rope_section(fields)
    rope = read_rope(
        fields, section, head_dim=read_head_dim(fields), default_theta=500_000.0, aliases={"mrope": "default"}
    )
    axes = interleaved_axes(section, rope.rotary_dim // 2, (24, 20, 20))
    has_bias = fields.flag("attention_bias", False)
    shape = read_common(fields, ropes=(evolve(rope, axis_of_frequency=axes),) * fields.positive("num_hidden_layers"))
    # With an image encoder, the number comes from the encoder's section (qwen3_vl.py).
    num_image_layers = fields.integer("num_image_layers", 0)
    return evolve(
        shape, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias, num_image_layers=max(num_image_layers, 0)
    )


FAMILY = DecoderFamily(
    architectures=("Qwen3VLTextModel",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=4096, mlp=22_016, layers=32, heads=32),
)
