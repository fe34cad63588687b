"""Read what families with gated delta networks beside gated attention have in common."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import AttentionGate, DecoderConfig
from paged_sdk.config.recurrent import GatedDeltaConfig
from paged_sdk.models.common_config import FULL, read_activation, read_common, read_head_dim
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.rope_fields import interleaved_axes, read_rope, rope_section

__all__ = ["read_gated_delta"]

_LINEAR = "linear_attention"


def read_gated_delta(
    fields: ConfigFields, *, is_grouped: bool, sections: tuple[int, int, int] | None = None
) -> DecoderConfig:
    """Read the shape of a decoder without experts.

    :param is_grouped: see :class:`~paged_sdk.config.recurrent.GatedDeltaConfig`
    :param sections: numbers of rotary frequencies of time, height and width, if the config states none; None: tokens
        have one position
    :raises CheckpointError: a value is missing or invalid, or no layer has attention
    """
    fields = fields.with_defaults(head_dim=256, max_position_embeddings=32_768, partial_rotary_factor=0.25)
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("hidden_act", Activation.SILU.value)
    delta = _read_delta(fields, is_grouped=is_grouped)
    types = _layer_types(fields)
    section = rope_section(fields)
    rope = read_rope(
        fields,
        section,
        head_dim=read_head_dim(fields),
        default_theta=10_000.0,
        aliases={"mrope": "default"},
        is_partial=True,
    )
    if sections is not None:
        rope = evolve(rope, axis_of_frequency=interleaved_axes(section, rope.rotary_dim // 2, sections))
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(fields, ropes=(rope,) * len(types)),
        norm_offset=1.0,
        norm_in_float32=True,
        qk_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        attention_gate=AttentionGate.WITH_QUERIES,
        recurrent=tuple(delta if each == _LINEAR else None for each in types),
    )


def _read_delta(fields: ConfigFields, *, is_grouped: bool) -> GatedDeltaConfig:
    num_key_heads = fields.positive("linear_num_key_heads", 16)
    num_value_heads = fields.positive("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {num_key_heads}")
    return GatedDeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.positive("linear_key_head_dim", 128),
        value_dim=fields.positive("linear_value_head_dim", 128),
        kernel_size=fields.positive("linear_conv_kernel_dim", 4),
        is_grouped=is_grouped,
    )


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Return for each layer whether it has attention or a gated delta network."""
    num_layers, interval = fields.positive("num_hidden_layers"), fields.positive("full_attention_interval", 4)
    types = fields.texts("layer_types") or tuple(
        _LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)
    )
    if len(types) != num_layers or not {FULL} <= set(types) <= {FULL, _LINEAR}:
        raise fields.error("layer_types", f"{FULL} or {_LINEAR} for each of {num_layers} layers, and {FULL} once")
    return types
