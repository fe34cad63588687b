"""Read MiniMax M2: mixtures of experts in every layer, whole norms of queries and keys, and partly rotated heads."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, QkNormWeights
from paged_sdk.models.common_config import read_common, read_head_dim, read_moe, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196_608,
        num_experts=256,
        num_experts_per_tok=8,
    )
    # The released checkpoints state the number of rotated elements instead of their share.
    if (rotary_dim := fields.optional_positive("rotary_dim")) is not None:
        fields = fields.with_defaults(partial_rotary_factor=rotary_dim / read_head_dim(fields))
    rope = read_one_rope(fields, default_theta=5_000_000.0, is_partial=True)
    shape = read_common(fields, ropes=(rope,) * fields.positive("num_hidden_layers"))
    moe = read_moe(
        fields,
        layers=range(shape.num_layers),
        intermediate_size=shape.intermediate_size,
        renormalize=True,
        known=("scoring_func", "use_routing_bias"),
    )
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise fields.error("scoring_func", "sigmoid")
    return evolve(
        shape,
        qk_norm=True,
        qk_norm_weights=QkNormWeights.WHOLE,
        moe=evolve(moe, sigmoid_scores=True, has_choice_bias=fields.flag("use_routing_bias", True)),
    )


_EXPERTS = ExpertNames(block="block_sparse_moe", choice_bias="e_score_correction_bias", gate="w1", up="w3", down="w2")

FAMILY = DecoderFamily(
    architectures=("MiniMaxM2ForCausalLM",),
    read=_read,
    # Checkpoints have the first names; transformers 5 may write those of its own classes.
    names=(TensorNames(experts=(_EXPERTS, ExpertNames(choice_bias="e_score_correction_bias"))),),
    sizes=Sizes(vocab=200_064, hidden=3072, mlp=1536, layers=62, heads=48),
)
