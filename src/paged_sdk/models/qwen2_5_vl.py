"""Read Qwen2.5-VL: an image encoder, and a decoder with three rotary positions per token."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    text_type="qwen2_5_vl_text",
    places=(("model.language_model.", "lm_head"), ("model.", "lm_head")),
)
