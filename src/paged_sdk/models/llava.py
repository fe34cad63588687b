"""Read LLaVA: an image encoder, and a decoder of another family."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LlavaForConditionalGeneration",))
