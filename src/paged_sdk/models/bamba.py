"""Read Bamba: Mamba-2 layers, and attention that rotates half of each head in some."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_activation, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.mamba2_fields import read_mamba2
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY", "NAMES"]

NAMES = TensorNames(
    recurrent="mamba",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norms=NormNames(mlp="pre_ff_layernorm", last="final_layernorm"),
)


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=262_144, rms_norm_eps=1e-5)
    # transformers takes half of each head, whatever the config says, unless rope_parameters say otherwise.
    fields = fields.updated(ConfigFields({"partial_rotary_factor": 0.5}))
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("hidden_act", Activation.SILU.value)
    num_layers, attending = fields.positive("num_hidden_layers"), fields.integers("attn_layer_indices")
    if not set(attending) & set(range(num_layers)):
        raise fields.error("attn_layer_indices", f"one of the {num_layers} layers at least")
    has_bias = fields.flag("attention_bias", False)
    mamba = read_mamba2(fields)
    layers = tuple(None if layer in attending else mamba for layer in range(num_layers))
    return evolve(
        read_common(fields, ropes=(read_one_rope(fields, is_partial=True),) * num_layers),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent=layers if any(layers) else (),
    )


FAMILY = DecoderFamily(
    architectures=("BambaForCausalLM",),
    read=_read,
    names=(NAMES,),
    sizes=Sizes(vocab=128_000, hidden=4096, mlp=14_336, layers=32, heads=32),
)
