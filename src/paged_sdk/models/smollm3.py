"""Read SmolLM3: llama without rotary positions in every fourth layer."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import read_common, read_layer_types, read_one_rope, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=4, max_position_embeddings=32_768)
    num_layers = fields.positive("num_hidden_layers")
    interval = fields.positive("no_rope_layer_interval", 4)
    rotated = fields.integers("no_rope_layers") or tuple((layer + 1) % interval for layer in range(num_layers))
    if len(rotated) < num_layers:
        raise fields.error("no_rope_layers", f"{num_layers} numbers, 0 for layers without positions")
    rope = read_one_rope(fields, default_theta=2_000_000.0)
    window = fields.optional_positive("sliding_window")
    has_window = window is not None and fields.flag("use_sliding_window", False)
    layer_types = read_layer_types(fields, lambda layer: has_window and not rotated[layer])
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(
            fields,
            ropes=tuple(rope if rotated[layer] else NO_ROPE for layer in range(num_layers)),
            sliding_windows=read_windows(fields, layer_types, window),
            tie_embeddings=True,
        ),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("SmolLM3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=128_256, hidden=2048, mlp=11_008, layers=36, heads=16),
)
