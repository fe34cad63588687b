"""Read GLM 4.5 and 4.6: mixtures of experts in all but the first layers, and partly rotated heads."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_later_layers
from paged_sdk.models.tensor_names import NUMBERED_MTP, MtpNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_routed_experts=128,
    )
    num_layers = fields.positive("num_hidden_layers")
    shape = read_common(fields, ropes=(read_one_rope(fields, is_partial=True),) * num_layers)
    shape = evolve(shape, qkv_bias=fields.flag("attention_bias", False), qk_norm=fields.flag("use_qk_norm", False))
    layers = read_later_layers(fields, num_layers, 1)
    return evolve(shape, moe=read_grouped_moe(fields, layers=layers)) if layers else shape


FAMILY = DecoderFamily(
    architectures=("Glm4MoeForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,), mtp=(NUMBERED_MTP, MtpNames())),),
    sizes=Sizes(vocab=151_552, hidden=4096, mlp=10_944, layers=46, heads=96),
)
