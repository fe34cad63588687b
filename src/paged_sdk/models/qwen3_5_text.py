"""Read the text decoder of Qwen 3.5: gated delta networks, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import Final

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gated_delta_fields import read_gated_delta
from paged_sdk.models.tensor_names import MtpNames, TensorNames

__all__ = ["FAMILY", "SECTIONS"]

SECTIONS: Final = 11, 11, 10
"""The numbers of rotary frequencies of time, height and width that a config may omit."""


def _read(fields: ConfigFields) -> DecoderConfig:
    return read_gated_delta(fields.with_defaults(num_key_value_heads=4), is_grouped=False, sections=SECTIONS)


FAMILY = DecoderFamily(
    architectures=("Qwen3_5ForCausalLM",),
    read=_read,
    names=(TensorNames(mtp=(MtpNames(),)),),
    sizes=Sizes(vocab=248_320, hidden=4096, mlp=12_288, layers=32, heads=16),
)
