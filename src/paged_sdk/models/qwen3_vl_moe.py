"""Read Qwen3-VL with mixtures of experts: an image encoder, and a decoder with three rotary positions per token."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily
from paged_sdk.models.qwen3_vl import with_image_layers

__all__ = ["FAMILY"]

FAMILY = NestedFamily(
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    text_type="qwen3_vl_moe_text",
    places=(("model.language_model.", "lm_head"),),
    adapt=with_image_layers,
)
