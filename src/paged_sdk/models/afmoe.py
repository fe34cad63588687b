"""Read AFMoE (Arcee's Trinity): experts with a bias of the choice, and attention with gates. Layers without a window
have no positions.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import AttentionGate, DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import SLIDING, read_common, read_layer_types, read_one_rope, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]

# What released checkpoints state and transformers' class does not read: it computes these values' models alone.
_ONE_GROUP = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        head_dim=128,
        max_position_embeddings=16_384,
        rms_norm_eps=1e-5,
        sliding_window=1024,
        moe_intermediate_size=1408,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        num_dense_layers=1,
    )
    _check_choice(fields)
    period = fields.positive("global_attn_every_n_layers", 4)
    layer_types = read_layer_types(fields, lambda layer: (layer + 1) % period != 0)
    rope = read_one_rope(fields)
    shape = evolve(
        read_common(
            fields,
            ropes=tuple(rope if each == SLIDING else NO_ROPE for each in layer_types),
            sliding_windows=read_windows(fields, layer_types, fields.optional_positive("sliding_window")),
        ),
        norm_in_float32=True,
        sandwich_norms=True,
        qk_norm=True,
        qkv_bias=(has_bias := fields.flag("attention_bias", False)),
        output_bias=has_bias,
        attention_gate=AttentionGate.APART,
    )
    if fields.flag("mup_enabled", False):
        shape = evolve(shape, embedding_scale=shape.hidden_size**0.5)
    layers = range(max(fields.integer("num_dense_layers"), 0), shape.num_layers)
    if not layers:
        return shape
    moe = read_grouped_moe(
        fields.updated(ConfigFields(dict.fromkeys(_ONE_GROUP))),
        layers=layers,
        count="num_experts",
        shared_count="num_shared_experts",
    )
    scale = fields.number("route_scale", 1.0)
    return evolve(shape, moe=evolve(moe, renormalize=True, routed_scale=scale, float32_router=False))


def _check_choice(fields: ConfigFields) -> None:
    """Refuse another choice of experts than that of transformers' class.

    :raises CheckpointError: the config describes another
    """
    if fields.is_set("score_func") and fields.text("score_func") != "sigmoid":
        raise fields.error("score_func", "sigmoid")
    if not fields.flag("route_norm", True):
        raise fields.error("route_norm", "true")
    for key in _ONE_GROUP:
        if fields.positive(key, 1) != 1:
            raise fields.error(key, "1")


_NORMS = NormNames(mlp="pre_mlp_layernorm", mlp_output="post_mlp_layernorm")
_EXPERTS = evolve(GROUPED_EXPERTS, router="router.gate", choice_bias="expert_bias")

FAMILY = DecoderFamily(
    architectures=("AfmoeForCausalLM",),
    read=_read,
    names=(TensorNames(norms=_NORMS, experts=(_EXPERTS,)),),
    sizes=Sizes(vocab=200_192, hidden=2048, mlp=6144, layers=32, heads=16),
)
