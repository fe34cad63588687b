"""Read LightOnOCR: Pixtral's encoder, and a Qwen 3 decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LightOnOcrForConditionalGeneration",), text_type="qwen3", ties=True)
