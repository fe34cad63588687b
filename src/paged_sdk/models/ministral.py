"""Read Ministral 8B: mistral whose layers may differ in whether they have a sliding window."""

from __future__ import annotations

from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.mistral import read_mistral

__all__ = ["FAMILY"]

FAMILY = DecoderFamily(
    architectures=("MinistralForCausalLM",),
    read=read_mistral,
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=14_336, layers=32, heads=32),
)
