"""Read LFM2-VL: an image encoder, and an LFM2 decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(
    architectures=("Lfm2VlForConditionalGeneration",),
    text_type="lfm2",
    places=(("model.language_model.", "lm_head"),),
    ties=True,
)
