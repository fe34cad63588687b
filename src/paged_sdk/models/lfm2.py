"""Read LFM2: gated short convolutions, and attention in some of the layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import ShortConvConfig
from paged_sdk.models.common_config import FULL, read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY", "NAMES", "read_lfm2"]

_CONV = "conv"

NAMES = TensorNames(
    output="self_attn.out_proj",
    recurrent="conv",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    norms=NormNames(
        attention="operator_norm",
        mlp="ffn_norm",
        query="self_attn.q_layernorm",
        key="self_attn.k_layernorm",
        last="embedding_norm",
    ),
)


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.renamed(intermediate_size="block_ff_dim")
    return read_lfm2(fields.updated(ConfigFields({"intermediate_size": _mlp_size(fields)})))


def read_lfm2(fields: ConfigFields) -> DecoderConfig:
    """Read what LFM2 with and without experts have in common.

    :raises CheckpointError: a value is missing or invalid, or no layer has attention
    """
    fields = fields.renamed(tie_word_embeddings="tie_embedding").with_defaults(
        num_key_value_heads=8, max_position_embeddings=128_000, norm_eps=1e-5
    )
    conv = ShortConvConfig(
        channels=fields.positive("hidden_size"),
        kernel_size=fields.positive("conv_L_cache", 3),
        bias=fields.flag("conv_bias", False),
    )
    types = _layer_types(fields)
    return evolve(
        read_common(
            fields,
            ropes=(read_one_rope(fields, default_theta=1e6),) * len(types),
            activation=Activation.SILU,
            tie_embeddings=True,
            eps="norm_eps",
        ),
        qk_norm=True,
        recurrent=tuple(conv if each == _CONV else None for each in types),
    )


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Return for each layer whether it has attention or a convolution."""
    layers = range(fields.positive("num_hidden_layers"))
    attending = layers if fields.values().get("full_attn_idxs") is None else fields.integers("full_attn_idxs")
    types = fields.texts("layer_types") or tuple(FULL if layer in attending else _CONV for layer in layers)
    if len(types) != len(layers) or not {FULL} <= set(types) <= {FULL, _CONV}:
        raise fields.error("layer_types", f"{FULL} or {_CONV} for each of {len(layers)} layers, and {FULL} once")
    return types


def _mlp_size(fields: ConfigFields) -> int:
    """Return the intermediate size of the MLPs, which by default is derived from the one that the config states."""
    size = fields.positive("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if "block_ffn_dim_multiplier" in fields and fields.optional_number("block_ffn_dim_multiplier") is None:
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    unit = fields.positive("block_multiple_of", 256)
    return -(-size // unit) * unit


FAMILY = DecoderFamily(
    architectures=("Lfm2ForCausalLM",),
    read=_read,
    names=(NAMES,),
    sizes=Sizes(vocab=65_536, hidden=2560, mlp=12_288, layers=32, heads=32),
)
