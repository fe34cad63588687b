"""Read Mistral 7B and its successors: llama with a sliding window in every layer, or none."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    # Only a config that says null has no window: the first release's, which lacks the field, has a window of 4096.
    window = fields.optional_positive("sliding_window") if "sliding_window" in fields else 4096
    return read_common(fields, sliding_windows=(window,) * fields.positive("num_hidden_layers"))


FAMILY = DecoderFamily(architectures=("MistralForCausalLM",), read=_read)
