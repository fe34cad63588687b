"""Read LLaVA-OneVision: an encoder of tiles before Qwen 2."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LlavaOnevisionForConditionalGeneration",), text_type="qwen2")
