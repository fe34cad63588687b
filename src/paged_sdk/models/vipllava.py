"""Read ViP-LLaVA: an image encoder several of whose layers are used, and a Llama decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("VipLlavaForConditionalGeneration",))
