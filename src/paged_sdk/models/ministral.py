"""Read Ministral 8B: mistral with a sliding window in some layers."""

from __future__ import annotations

from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.mistral import read_mistral

__all__ = ["FAMILY"]

FAMILY = DecoderFamily(
    architectures=("MinistralForCausalLM",),
    read=read_mistral,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=14_336, layers=32, heads=32),
)
