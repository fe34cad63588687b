"""Read Gemma 2: Gemma with norms before and after attention and MLP, softcaps of scores and logits, and sliding windows
in every second layer.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.models.common_config import read_activation, read_common, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gemma import must_be_causal
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY", "NORMS", "read_gemma"]

NORMS = NormNames(mlp="pre_feedforward_layernorm")


def read_gemma(
    fields: ConfigFields, *, layer_types: tuple[str, ...], window: int, ropes: tuple[RopeConfig, ...] | None = None
) -> DecoderConfig:
    """Read the fields that Gemma 2 and 3 have in common.

    :param window: number of tokens that a query attends to in layers with a window
    :param ropes: the rotary embedding of each layer; None: one for all layers, read from the usual fields
    """
    shape = read_common(
        fields,
        ropes=ropes,
        sliding_windows=read_windows(fields, layer_types, window),
        activation=read_activation(fields, "hidden_activation", Activation.GELU_TANH),
        tie_embeddings=True,
    )
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=shape.hidden_size**0.5,
        norm_offset=1.0,
        sandwich_norms=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


def _read(fields: ConfigFields) -> DecoderConfig:
    must_be_causal(fields)
    # Missing fields mean the defaults; only an explicit null means no softcap.
    fields = fields.with_defaults(
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    window = fields.positive("sliding_window", 4096)
    return read_gemma(fields, layer_types=read_layer_types(fields, lambda layer: layer % 2 == 0), window=window)


FAMILY = DecoderFamily(
    architectures=("Gemma2ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=256_000, hidden=2304, mlp=9216, layers=26, heads=8),
    names=(TensorNames(norms=NORMS),),
)
