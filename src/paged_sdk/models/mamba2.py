"""Read Mamba-2: selective state spaces in all layers, and nothing else."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, LayerParts
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.mamba2_fields import must_not_limit_steps
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]

_ANY_LENGTH: Final = 2**20
"""Context in tokens. Configs state none: states have one size for texts of any length, though models forget, and have
been trained with texts of 2,048 tokens and more. llama.cpp's converter writes this number, too."""


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(vocab_size=32_768, hidden_size=4096, num_hidden_layers=64, layer_norm_epsilon=1e-5)
    num_layers, mamba = fields.positive("num_hidden_layers"), _read_mamba(fields)
    # Of attention and MLPs there are none. What their sizes are is never asked.
    unused = {
        "num_attention_heads": mamba.num_heads,
        "num_key_value_heads": mamba.num_heads,
        "head_dim": mamba.head_dim,
        "intermediate_size": mamba.width,
        "max_position_embeddings": _ANY_LENGTH,
    }
    return evolve(
        read_common(
            fields.updated(ConfigFields(unused)),
            ropes=(NO_ROPE,) * num_layers,
            activation=Activation.SILU,
            eps="layer_norm_epsilon",
        ),
        recurrent=(mamba,) * num_layers,
        parts=(LayerParts.MIXER,) * num_layers,
    )


def _read_mamba(fields: ConfigFields) -> Mamba2Config:
    heads, head_dim, groups = (
        fields.positive(key, default) for key, default in (("num_heads", 128), ("head_dim", 64), ("n_groups", 8))
    )
    width = fields.positive("expand", 2) * fields.positive("hidden_size")
    if heads * head_dim != width:
        raise fields.error("num_heads", f"{width // head_dim}: expand times hidden_size is {width}, of {head_dim} each")
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of num_heads = {heads}")
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("hidden_act", Activation.SILU.value)
    must_not_limit_steps(fields)
    has_bias = fields.flag("use_bias", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.positive("state_size", 128),
        num_groups=groups,
        kernel_size=fields.positive("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        input_bias=has_bias,
        output_bias=has_bias,
    )


FAMILY = DecoderFamily(
    architectures=("Mamba2ForCausalLM",),
    read=_read,
    names=(
        TensorNames(
            body="backbone.",
            embedding="embeddings",
            recurrent="mixer",
            norms=NormNames(attention="norm", last="norm_f"),
        ),
    ),
)
