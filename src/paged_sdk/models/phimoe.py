"""Read Phi-3.5-MoE: llama with layer norms, biases, and a mixture of experts that selects two per token."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, NormKind
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.models.common_config import must_not_be_tied, read_common, read_moe, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import rope_section
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY"]


def _read_rope(fields: ConfigFields) -> RopeConfig:
    """Read the rotary embedding; if it is scaled, the config states the factor of cosines and sines."""
    rope = read_one_rope(fields, default_theta=1_000_000.0)
    if rope.kind is RopeKind.DEFAULT:
        return rope
    section = rope_section(fields)
    factor = section.number("short_mscale")
    if section.number("long_mscale") != factor:
        raise section.error("long_mscale", f"short_mscale = {factor}")
    # transformers uses the short frequencies for sequences of every length.
    return evolve(rope, long_factor=rope.short_factor, attention_factor=1.0, gguf_attn_factor=factor)


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5, num_experts=16
    )
    has_bias, head_bias = fields.flag("attention_bias", False), fields.flag("lm_head_bias", False)
    if head_bias:
        must_not_be_tied(fields)
    num_layers, rope = fields.positive("num_hidden_layers"), _read_rope(fields)
    shape = read_common(
        fields, ropes=(rope,) * num_layers, sliding_windows=(fields.optional_positive("sliding_window"),) * num_layers
    )
    # Two experts are selected whatever the config states, as in transformers.
    moe = read_moe(
        ConfigFields({**fields.values(), "num_experts_per_tok": 2}),
        layers=range(num_layers),
        intermediate_size=shape.intermediate_size,
        renormalize=False,
    )
    return evolve(
        shape,
        # Longer sequences would need the long frequencies, which are not used.
        max_position=rope.original_max_position if rope.kind is RopeKind.LONGROPE else shape.max_position,
        norm=NormKind.LAYER,
        norm_bias=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        head_bias=head_bias,
        moe=evolve(moe, sparse_mixer=2 * fields.number("router_jitter_noise", 0.01)),
    )


# Checkpoints have the names of the first release; transformers 5 may write the names of its own classes.
_EXPERTS = (
    ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ExpertNames(router="router"),
)

FAMILY = DecoderFamily(
    architectures=("PhimoeForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_064, hidden=4096, mlp=6400, layers=32, heads=32),
    names=(TensorNames(experts=_EXPERTS),),
)
