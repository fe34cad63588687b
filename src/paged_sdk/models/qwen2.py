"""Read Qwen 2 and 2.5: llama with biases of queries, keys and values; the upper layers may have sliding windows."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "read_qwen_windows"]


def read_qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Return the window of each layer of Qwen 2 and 3."""
    fields = fields.with_defaults(sliding_window=4096)
    window = fields.optional_positive("sliding_window") if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28)
    return read_windows(fields, read_layer_types(fields, lambda layer: window is not None and layer >= first), window)


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(num_key_value_heads=32, max_position_embeddings=32_768)
    return evolve(read_common(fields, sliding_windows=read_qwen_windows(fields)), qkv_bias=True)


FAMILY = DecoderFamily(
    architectures=("Qwen2ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=4096, mlp=22_016, layers=32, heads=32),
)
