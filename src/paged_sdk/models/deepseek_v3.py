"""Read DeepSeek V3 and R1, and GGUF files of Kimi K2: latent attention, and experts in all but the first layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_later_layers
from paged_sdk.models.tensor_names import NUMBERED_MTP, MtpNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=4096,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )
    shape = read_latent(fields)
    layers = read_later_layers(fields, shape.num_layers, 3)
    return evolve(shape, moe=read_grouped_moe(fields, layers=layers)) if layers else shape


FAMILY = DecoderFamily(
    architectures=("DeepseekV3ForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,), mtp=(NUMBERED_MTP, MtpNames())),),
    sizes=Sizes(vocab=129_280, hidden=7168, mlp=18_432, layers=61, heads=128),
)
