"""Read Ministral 8B: mistral whose layers may differ in whether they have a sliding window."""

from __future__ import annotations

from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.mistral import read_mistral

__all__ = ["FAMILY"]

FAMILY = DecoderFamily(architectures=("MinistralForCausalLM",), read=read_mistral)
