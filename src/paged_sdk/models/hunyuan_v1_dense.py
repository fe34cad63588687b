"""Read Hunyuan's dense models: llama with norms of queries and keys after their rotation."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import rope_section
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY", "NORMS", "read_hunyuan"]

NORMS = NormNames(query="self_attn.query_layernorm", key="self_attn.key_layernorm")


def read_hunyuan(fields: ConfigFields) -> DecoderConfig:
    """Read what Hunyuan with and without experts have in common.

    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    shape = read_common(fields, ropes=(_read_rope(fields),) * fields.positive("num_hidden_layers"))
    has_bias = fields.flag("attention_bias", False)
    return evolve(shape, qk_norm=True, qk_norm_after_rope=True, qkv_bias=has_bias, output_bias=has_bias)


def _read_rope(fields: ConfigFields) -> RopeConfig:
    """Read the rotary embedding; if dynamic scaling states ``alpha``, it is a larger base for texts of every length."""
    rope, section = read_one_rope(fields), rope_section(fields)
    if rope.kind is not RopeKind.DYNAMIC or not section.is_set("alpha"):
        return rope
    if rope.rotary_dim < 4:
        raise fields.error("head_dim", "at least 4")
    theta = rope.theta * section.number("alpha") ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return evolve(rope, kind=RopeKind.DEFAULT, theta=theta, factor=1.0)


FAMILY = DecoderFamily(
    architectures=("HunYuanDenseV1ForCausalLM",),
    read=read_hunyuan,
    names=(TensorNames(norms=NORMS),),
    sizes=Sizes(vocab=290_943, hidden=4096, mlp=11_008, layers=32, heads=32),
)
