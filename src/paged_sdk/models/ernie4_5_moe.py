"""Read Ernie 4.5 with mixtures of experts, chosen by a softmax with a bias, and shared experts beside them."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import must_not_be_tied, read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.ernie4_5 import read_ernie4_5
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, shared_size
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.renamed(num_experts="moe_num_experts", num_experts_per_tok="moe_k").with_defaults(
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=6,
        moe_num_shared_experts=2,
    )
    has_bias = fields.flag("use_bias", False)
    if has_bias:
        must_not_be_tied(fields.with_defaults(tie_word_embeddings=True))
    shape = evolve(read_ernie4_5(fields), head_bias=has_bias)
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    last = shape.num_layers - 1 if last == -1 else last
    step, size = fields.positive("moe_layer_interval", 1), fields.positive("moe_intermediate_size", 1536)
    chosen = [layer for layer in range(shape.num_layers) if first <= layer <= last and (layer + 1) % step == 0]
    if not chosen:
        return shape
    return evolve(
        shape,
        moe=evolve(
            read_moe(fields, layers=chosen, intermediate_size=size, renormalize=True),
            shared_intermediate_size=shared_size(fields, "moe_num_shared_experts", size),
            has_choice_bias=True,
            min_sum=fields.number("moe_norm_min", 1e-12),
            float32_router=True,
        ),
    )


_EXPERTS = evolve(GROUPED_EXPERTS, choice_bias="moe_statics.e_score_correction_bias")

FAMILY = DecoderFamily(
    architectures=("Ernie4_5_MoeForCausalLM",),
    read=_read,
    # Checkpoints have the first name of the bias; in transformers' classes it is a part of the router.
    names=(TensorNames(experts=(_EXPERTS, evolve(_EXPERTS, choice_bias="gate.moe_statics.e_score_correction_bias"))),),
    sizes=Sizes(vocab=103_424, hidden=2560, mlp=12_288, layers=28, heads=20),
)
