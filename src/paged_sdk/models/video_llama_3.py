"""Read VideoLLaMA 3: an encoder of images of any size, and a Qwen 2 decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("VideoLlama3ForConditionalGeneration",), text_type="qwen2")
