"""Read Qwen 3.5: an image encoder, and a decoder with gated delta networks."""

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(
    architectures=("Qwen3_5ForConditionalGeneration",),
    text_type="qwen3_5_text",
    places=(("model.language_model.", "lm_head"),),
    unused=("mtp.",),  # layers that predict further tokens
)
