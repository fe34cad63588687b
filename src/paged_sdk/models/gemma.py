"""Read Gemma: llama with scaled embeddings, norms that multiply by 1 + weight, and GELU."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.common_config import read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "must_be_causal"]


def must_be_causal(fields: ConfigFields) -> None:
    """Refuse bidirectional attention, for Gemma classes of which no released model has it.

    :raises UnsupportedArchitectureError: the config asks for bidirectional attention
    """
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedArchitectureError(
            "config.json: use_bidirectional_attention = true: an encoder, which generates no text",
            architecture=fields.text("model_type"),
        )


def _read(fields: ConfigFields) -> DecoderConfig:
    must_be_causal(fields)
    fields = fields.with_defaults(num_key_value_heads=16, head_dim=256, max_position_embeddings=8192)
    activation = read_activation(fields, "hidden_act", Activation.GELU_TANH)
    # The first releases state "gelu", but were trained with the tanh approximation.
    shape = read_common(
        fields,
        activation=Activation.GELU_TANH if fields.text("hidden_act", "gelu") == "gelu" else activation,
        tie_embeddings=True,
    )
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        embedding_scale=shape.hidden_size**0.5,
        norm_offset=1.0,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


FAMILY = DecoderFamily(
    architectures=("GemmaForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=256_000, hidden=3072, mlp=24_576, layers=28, heads=16),
)
