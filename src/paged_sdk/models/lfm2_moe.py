"""Read LFM2 with mixtures of experts in all but its first layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.lfm2 import NAMES, read_lfm2
from paged_sdk.models.tensor_names import ExpertNames

__all__ = ["FAMILY"]

_SCALE = "routed_scaling_factor"


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        intermediate_size=7168, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792
    )
    shape = read_lfm2(fields)
    num_dense = fields.integer("num_dense_layers", 2)
    if num_dense >= shape.num_layers:
        return shape
    moe = read_moe(
        fields,
        layers=range(max(num_dense, 0), shape.num_layers),
        intermediate_size=fields.positive("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", True),
        known=(_SCALE,),
    )
    return evolve(
        shape,
        moe=evolve(
            moe,
            sigmoid_scores=True,
            has_choice_bias=fields.flag("use_expert_bias", True),
            sum_offset=1e-6,
            routed_scale=fields.number(_SCALE, 1.0),
        ),
    )


FAMILY = DecoderFamily(
    architectures=("Lfm2MoeForCausalLM",),
    read=_read,
    names=(evolve(NAMES, experts=(ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2"),)),),
    sizes=Sizes(vocab=65_536, hidden=2048, mlp=7168, layers=32, heads=32),
)
