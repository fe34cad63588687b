"""Read Apertus: llama with norms of queries and keys, and MLPs without a gate whose activation has learned numbers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_activation, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import rope_section
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]

_THETA = 12_000_000.0
# transformers' class takes these where config.json has no section of the rotary embedding, whatever its rope_theta.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(max_position_embeddings=65_536, rms_norm_eps=1e-5)
    if not rope_section(fields).values():
        fields = fields.updated(ConfigFields({"rope_parameters": _ROPE}))
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        read_common(
            fields,
            ropes=(read_one_rope(fields, default_theta=_THETA),) * fields.positive("num_hidden_layers"),
            activation=read_activation(fields, "hidden_act", Activation.XIELU),
        ),
        gated_mlp=False,
        qk_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


_NORMS = NormNames(attention="attention_layernorm", mlp="feedforward_layernorm")

FAMILY = DecoderFamily(
    architectures=("ApertusForCausalLM",),
    read=_read,
    names=(TensorNames(norms=_NORMS),),
    sizes=Sizes(vocab=131_072, hidden=4096, mlp=14_336, layers=32, heads=32),
)
