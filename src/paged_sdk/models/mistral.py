"""Read Mistral 7B and its successors: llama with a sliding window in all layers, in those that the config names, or in
none.
"""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "read_mistral"]


def read_mistral(fields: ConfigFields) -> DecoderConfig:
    """Read the shape of Mistral and Ministral, which have the same fields."""
    # Only an explicit null means no window: the first release's config lacks the field and means 4096.
    fields = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096)
    window = fields.optional_positive("sliding_window")
    layer_types = read_layer_types(fields, lambda _: window is not None)
    return read_common(fields, sliding_windows=read_windows(fields, layer_types, window))


FAMILY = DecoderFamily(
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    read=read_mistral,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=14_336, layers=32, heads=32),
)
