"""Read the config fields of families with latent attention, by Hugging Face's names."""

from __future__ import annotations

import math

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.rope_fields import read_rope, rope_section

__all__ = ["read_latent"]


def read_latent(
    fields: ConfigFields, *, default_query_rank: int = 1536, is_partial: bool = False, tie_embeddings: bool = False
) -> DecoderConfig:
    """Read the shape of a llama with latent attention in all layers.

    :param default_query_rank: ``q_lora_rank`` if the config does not have it; null means none
    :param is_partial: whether ``partial_rotary_factor`` has a meaning; it must be 1
    :param tie_embeddings: default of ``tie_word_embeddings``
    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(
        kv_lora_rank=512, q_lora_rank=default_query_rank, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    latent = LatentAttentionConfig(
        rank=fields.positive("kv_lora_rank"),
        rope_dim=fields.positive("qk_rope_head_dim"),
        nope_dim=fields.positive("qk_nope_head_dim"),
        value_dim=fields.positive("v_head_dim"),
        query_rank=fields.optional_positive("q_lora_rank"),
        # transformers' classes do not read rms_norm_eps there, and llama.cpp does.
        norm_eps=fields.number("latent_norm_eps", 1e-6),
    )
    rope = _read_rope(fields, latent, is_partial=is_partial)
    num_heads = fields.positive("num_attention_heads")
    if fields.positive("num_key_value_heads", num_heads) != num_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads = {num_heads}, as latent attention needs")
    shape = read_common(
        fields.updated(ConfigFields({"head_dim": latent.rope_dim})),
        ropes=(rope,) * fields.positive("num_hidden_layers"),
        tie_embeddings=tie_embeddings,
    )
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.key_dim,
        attention_scale=latent.query_dim**-0.5 * _scale_of_long_contexts(rope),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


def _read_rope(fields: ConfigFields, latent: LatentAttentionConfig, *, is_partial: bool) -> RopeConfig:
    rope = read_rope(
        fields, rope_section(fields), head_dim=latent.rope_dim, default_theta=10_000.0, is_partial=is_partial
    )
    if rope.rotary_dim != latent.rope_dim:
        raise fields.error("partial_rotary_factor", "1, since qk_rope_head_dim elements are rotated")
    return evolve(rope, interleaved=fields.flag("rope_interleave", True))


def _scale_of_long_contexts(rope: RopeConfig) -> float:
    """Return the factor on scores for the longer context, beside what cosines and sines have (YaRN's mscale)."""
    if rope.kind is RopeKind.DEFAULT or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
