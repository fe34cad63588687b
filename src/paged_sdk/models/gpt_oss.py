"""Read gpt-oss: mixtures of experts with biases and clamped activations, sliding windows in every second layer, and
attention sinks: a learned logit per head.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_types, read_moe, read_one_rope, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY"]

# Default of configs without settings of the rotary embedding.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        sliding_window=128,
        num_experts=128,
        num_experts_per_tok=4,
    )
    if not (fields.section("rope_scaling").values() or fields.section("rope_parameters").values()):
        fields = ConfigFields({**fields.values(), "rope_parameters": _ROPE})
    layer_types = read_layer_types(fields, lambda layer: (layer + 1) % 2 != 0)
    num_layers = len(layer_types)
    shape = read_common(
        fields,
        ropes=(read_one_rope(fields, default_theta=150_000.0),) * num_layers,
        sliding_windows=read_windows(fields, layer_types, fields.optional_positive("sliding_window")),
    )
    has_bias = fields.flag("attention_bias", True)
    moe = read_moe(fields, layers=range(num_layers), intermediate_size=shape.intermediate_size, renormalize=True)
    return evolve(
        shape,
        norm_in_float32=True,
        attention_sinks=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        moe=evolve(
            moe,
            has_biases=True,
            swiglu_alpha=fields.number("swiglu_alpha", 1.702),
            swiglu_limit=fields.number("swiglu_limit", 7.0),
            alternates=True,
        ),
    )


FAMILY = DecoderFamily(
    architectures=("GptOssForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=201_088, hidden=2880, mlp=2880, layers=36, heads=64),
    names=(TensorNames(experts=(ExpertNames(router="router"),)),),
)
