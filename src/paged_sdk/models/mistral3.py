"""Read Mistral 3: Pixtral's encoder, and a Mistral decoder."""

from __future__ import annotations

from paged_sdk.models.family import NestedFamily

__all__ = ["FAMILY"]

FAMILY = NestedFamily(architectures=("Mistral3ForConditionalGeneration",), text_type="mistral", ties=True)
