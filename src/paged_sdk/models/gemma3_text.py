"""Read Gemma 3's text decoder: Gemma 2 with norms of queries and keys, and a separate rotary embedding for layers with
sliding windows.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_layer_ropes, read_layer_types
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gemma2 import NORMS, read_gemma
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY", "read_gemma3_text"]


def read_gemma3_text(fields: ConfigFields) -> DecoderConfig:
    """Read the shape of the text decoder.

    :param fields: the text decoder's config, which may omit values that the released models share
    :raises CheckpointError: a value is missing or invalid
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
    # The older form has a separate field for the base of layers with windows.
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    ropes = read_layer_ropes(fields, layer_types, full_theta=1_000_000.0, windowed_theta=local_theta)
    window, bidirectional = fields.positive("sliding_window", 4096), fields.flag("use_bidirectional_attention", False)
    # With bidirectional attention, transformers divides the window between both directions.
    window = window // 2 + 1 if bidirectional else window
    shape = read_gemma(fields, layer_types=layer_types, window=window, ropes=ropes)
    # Gemma 3 has no softcap of scores: transformers ignores the field.
    return evolve(shape, attention_softcap=None, qk_norm=True, bidirectional=bidirectional)


FAMILY = DecoderFamily(
    architectures=("Gemma3ForCausalLM",),
    read=read_gemma3_text,
    sizes=Sizes(vocab=262_208, hidden=2304, mlp=9216, layers=26, heads=8),
    names=(TensorNames(norms=NORMS),),
)
