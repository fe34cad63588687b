"""Read the text decoder of Qwen 3.5 with mixtures of experts in all layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gated_delta_fields import read_gated_delta
from paged_sdk.models.qwen3_5_text import SECTIONS
from paged_sdk.models.tensor_names import MtpNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )
    size = fields.positive("moe_intermediate_size")
    shape = read_gated_delta(fields.with_defaults(intermediate_size=size), is_grouped=False, sections=SECTIONS)
    moe = read_moe(
        fields,
        layers=range(shape.num_layers),
        intermediate_size=size,
        renormalize=True,
        shared_intermediate_size=fields.positive("shared_expert_intermediate_size"),
    )
    return evolve(shape, moe=moe)


FAMILY = DecoderFamily(
    architectures=("Qwen3_5MoeForCausalLM",),
    read=_read,
    names=(TensorNames(mtp=(MtpNames(),)),),
    sizes=Sizes(vocab=248_320, hidden=2048, mlp=512, layers=40, heads=16),
)
