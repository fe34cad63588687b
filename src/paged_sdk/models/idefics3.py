"""Read Idefics 3: an encoder of image tiles, and a Llama decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("Idefics3ForConditionalGeneration",), places=(("model.text_model.", "lm_head"),))
