"""Read the GLM-4 models of 2025: GLM-4 with additional norms after attention and after the MLP."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.glm import read_glm
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    return evolve(read_glm(fields), sandwich_norms=True)


_NORMS = NormNames(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")

FAMILY = DecoderFamily(
    architectures=("Glm4ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=151_552, hidden=4096, mlp=13_696, layers=40, heads=32),
    names=(TensorNames(gate_up=("mlp.gate_up_proj",), norms=_NORMS),),
)
