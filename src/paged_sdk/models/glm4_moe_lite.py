"""Read GLM 4.7 Flash: latent attention, and mixtures of experts in all but some layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_sparse_layers
from paged_sdk.models.tensor_names import NUMBERED_MTP, MtpNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    # transformers' class has two names for one field, of which this one wins.
    fields = fields.renamed(qk_rope_head_dim="head_dim").with_defaults(
        max_position_embeddings=202_752,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
    )
    shape = read_latent(fields, is_partial=True)
    layers = read_sparse_layers(fields, shape.num_layers, range(1, shape.num_layers))
    return evolve(shape, moe=read_grouped_moe(fields, layers=layers)) if layers else shape


FAMILY = DecoderFamily(
    architectures=("Glm4MoeLiteForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,), mtp=(NUMBERED_MTP, MtpNames())),),
    sizes=Sizes(vocab=154_880, hidden=2048, mlp=10_240, layers=47, heads=20),
)
