"""Read ViP-LLaVA: several layers of an encoder before Llama."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("VipLlavaForConditionalGeneration",))
