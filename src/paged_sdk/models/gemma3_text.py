"""Read Gemma 3's text decoder: Gemma 2 with normed queries and keys, and two rotary embeddings, one for layers with
windows.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_layer_ropes, read_layer_types
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes, TensorNames
from paged_sdk.models.gemma2 import NORMS, read_gemma

__all__ = ["FAMILY", "read_gemma3_text"]


def read_gemma3_text(fields: ConfigFields) -> DecoderConfig:
    """Read the shape of the text decoder.

    :param fields: the text decoder's config, which may leave out what the released models share
    :raises CheckpointError: a value that is missing or cannot be used
    """
    fields = fields.with_defaults(
        model_type="gemma3_text",
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
    )
    layer_types = read_layer_types(
        fields, lambda layer: (layer + 1) % fields.positive("sliding_window_pattern", 6) != 0
    )
    # The older form has a field of its own for the base of layers with windows.
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    ropes = read_layer_ropes(fields, layer_types, full_theta=1_000_000.0, windowed_theta=local_theta)
    window, bidirectional = fields.positive("sliding_window", 4096), fields.flag("use_bidirectional_attention", False)
    # An encoder's window is as wide in both directions together, as transformers has it.
    window = window // 2 + 1 if bidirectional else window
    shape = read_gemma(fields, layer_types=layer_types, window=window, ropes=ropes)
    # Gemma 3 has no caps on scores: transformers leaves a value that is there unread.
    return evolve(shape, attention_softcap=None, qk_norm=True, bidirectional=bidirectional)


FAMILY = DecoderFamily(
    architectures=("Gemma3ForCausalLM",),
    read=read_gemma3_text,
    sizes=Sizes(vocab=262_208, hidden=2304, mlp=9216, layers=26, heads=8),
    names=(TensorNames(norms=NORMS),),
)
