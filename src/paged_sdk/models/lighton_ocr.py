"""Read LightOnOCR: Pixtral's encoder before Qwen 3."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("LightOnOcrForConditionalGeneration",), text_type="qwen3", ties=True)
