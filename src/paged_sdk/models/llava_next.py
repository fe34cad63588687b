"""Read LLaVA-NeXT: LLaVA with images cut into tiles."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LlavaNextForConditionalGeneration",))
