"""Read Falcon-H1: attention and a Mamba-2 layer side by side in every layer, with factors at most of their vectors."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import BranchScales, DecoderConfig
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.models.bamba import NAMES
from paged_sdk.models.common_config import read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.mamba2_fields import read_mamba2

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, mamba_d_ssm=1024
    )
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("hidden_act", Activation.SILU.value)
    has_bias = fields.flag("attention_bias", False)
    scales = _branch_scales(fields)
    shape = read_common(fields)
    return evolve(
        shape,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent=(_read_mamba(fields),) * shape.num_layers,
        recurrent_beside=True,
        branch_scales=None if scales == BranchScales() else scales,
    )


def _read_mamba(fields: ConfigFields) -> Mamba2Config:
    scales, has_norm = _factors(fields, "ssm_multipliers", 5), fields.flag("mamba_rms_norm", False)
    return evolve(
        read_mamba2(fields, width=fields.optional_positive("mamba_d_ssm")),
        output_bias=fields.flag("projectors_bias", False),
        has_norm=has_norm,
        gate_first=not (has_norm and fields.flag("mamba_norm_before_gate", True)),
        input_scale=fields.number("ssm_in_multiplier", 1.0),
        part_scales=() if scales == (1.0,) * 5 else scales,
        output_scale=fields.number("ssm_out_multiplier", 1.0),
    )


def _branch_scales(fields: ConfigFields) -> BranchScales:
    gate, output = _factors(fields, "mlp_multipliers", 2)
    return BranchScales(
        attention_input=fields.number("attention_in_multiplier", 1.0),
        key=fields.number("key_multiplier", 1.0),
        attention_output=fields.number("attention_out_multiplier", 1.0),
        gate=gate,
        mlp_output=output,
    )


def _factors(fields: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    found = fields.numbers(key) or (1.0,) * count
    if len(found) != count:
        raise fields.error(key, f"{count} numbers")
    return found


FAMILY = DecoderFamily(
    architectures=("FalconH1ForCausalLM",),
    read=_read,
    names=(NAMES,),
    sizes=Sizes(vocab=128_000, hidden=4096, mlp=14_336, layers=32, heads=32),
)
