"""Read Mixtral: mistral with a mixture of experts in every layer (Jiang et al., 2024, arXiv 2401.04088)."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        num_experts=8,
        num_experts_per_tok=2,
    )
    num_layers = fields.positive("num_hidden_layers")
    shape = read_common(fields, sliding_windows=(fields.optional_positive("sliding_window"),) * num_layers)
    return evolve(
        shape,
        moe=read_moe(fields, layers=range(num_layers), intermediate_size=shape.intermediate_size, renormalize=True),
    )


# Checkpoints have the names of the first release; transformers 5 may write the names of its own classes.
_EXPERTS = (ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"), ExpertNames())

FAMILY = DecoderFamily(
    architectures=("MixtralForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=14_336, layers=32, heads=32),
    names=(TensorNames(experts=_EXPERTS),),
)
