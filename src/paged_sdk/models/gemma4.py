"""Read the text decoder of Gemma 4 with image encoder."""

from __future__ import annotations

from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]


def _sees_images_both_ways(fields: ConfigFields) -> bool:
    """Return whether the tokens of an image attend to one another in both directions, in layers with windows only."""
    return fields.section("text_config").text("use_bidirectional_attention", "") == "vision"


FAMILY = NestedFamily(
    architectures=("Gemma4ForConditionalGeneration",),
    text_type="gemma4_text",
    places=(("model.language_model.", "lm_head"),),
    ties=True,
    unused=("model.audio_tower.", "model.embed_audio."),
    images_elsewhere=_sees_images_both_ways,
)
