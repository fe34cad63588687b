"""Read LLaVA-OneVision: an encoder of image tiles, and a Qwen 2 decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LlavaOnevisionForConditionalGeneration",), text_type="qwen2")
