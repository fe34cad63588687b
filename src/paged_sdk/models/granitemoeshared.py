"""Read Granite with mixtures of experts and an MLP beside them that every token uses."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.granitemoe import NAMES, read_granite_moe

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    key = "shared_intermediate_size"
    return read_granite_moe(fields, fields.positive(key) if fields.is_set(key) else None)


FAMILY = DecoderFamily(
    architectures=("GraniteMoeSharedForCausalLM",),
    read=_read,
    names=(NAMES,),
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
