"""Read Qwen3-VL: an image encoder, and a decoder with three rotary positions per token."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY", "with_image_layers"]


def with_image_layers(shape: DecoderConfig, fields: ConfigFields) -> DecoderConfig:
    """Return the decoder's shape with the number of layers that take image vectors.

    :param fields: the whole config
    """
    layers = fields.section("vision_config").integers("deepstack_visual_indexes") or (8, 16, 24)
    return evolve(shape, num_image_layers=len(layers))


FAMILY = NestedFamily(
    architectures=("Qwen3VLForConditionalGeneration",),
    text_type="qwen3_vl_text",
    places=(("model.language_model.", "lm_head"),),
    adapt=with_image_layers,
)
