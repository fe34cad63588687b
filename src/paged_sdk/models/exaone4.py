"""Read EXAONE 4: llama with norms of queries and keys, and norms after attention and MLP instead of before. In models
with sliding windows, layers without a window have no positions.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import read_common, read_layer_types, read_one_rope, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    window = fields.optional_positive("sliding_window")
    layer_types = read_layer_types(
        fields,
        lambda layer: window is not None and (layer + 1) % fields.positive("sliding_window_pattern", 4) != 0,
    )
    windows = read_windows(fields, layer_types, window)
    rope = read_one_rope(fields)
    return evolve(
        read_common(
            fields,
            ropes=tuple(rope if window is None or each is not None else NO_ROPE for each in windows),
            sliding_windows=windows,
        ),
        input_norms=False,
        sandwich_norms=True,
        qk_norm=True,
    )


FAMILY = DecoderFamily(
    architectures=("Exaone4ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=102_400, hidden=4096, mlp=16_384, layers=32, heads=32),
)
