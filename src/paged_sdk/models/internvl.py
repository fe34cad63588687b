"""Read InternVL 3: an encoder of image tiles, and a Qwen 2 decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("InternVLForConditionalGeneration",), text_type="qwen2", ties=True)
