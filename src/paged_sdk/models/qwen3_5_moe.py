"""Read Qwen 3.5 with mixtures of experts: an image encoder, and a decoder with gated delta networks."""

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    text_type="qwen3_5_moe_text",
    places=(("model.language_model.", "lm_head"),),
    unused=("mtp.",),  # layers that predict further tokens
)
