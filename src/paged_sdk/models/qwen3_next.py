"""Read Qwen3-Next: gated delta networks, and gated attention in every fourth layer; mixtures of experts."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gated_delta_fields import read_gated_delta
from paged_sdk.models.tensor_names import MtpNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        intermediate_size=5632,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )
    shape = read_gated_delta(fields, is_grouped=True)
    step, dense = fields.positive("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = [layer for layer in range(shape.num_layers) if layer not in dense and (layer + 1) % step == 0]
    if not layers or not fields.integer("num_experts"):
        return shape
    return evolve(
        shape,
        moe=read_moe(
            fields,
            layers=layers,
            intermediate_size=fields.positive("moe_intermediate_size"),
            renormalize=fields.flag("norm_topk_prob", True),
            shared_intermediate_size=fields.positive("shared_expert_intermediate_size"),
        ),
    )


FAMILY = DecoderFamily(
    architectures=("Qwen3NextForCausalLM",),
    read=_read,
    names=(TensorNames(mtp=(MtpNames(),)),),
    sizes=Sizes(vocab=151_936, hidden=2048, mlp=5632, layers=48, heads=16),
)
