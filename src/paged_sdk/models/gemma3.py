"""Read the text decoder of Gemma 3 with image encoder."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.gemma import must_be_causal
from paged_sdk.models.gemma2 import NORMS
from paged_sdk.models.gemma3_text import FAMILY as TEXT
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    own = fields.section("text_config")
    must_be_causal(own)
    text = TEXT.read_section(own)
    # In transformers, only the text-only class applies the logit softcap, and the whole model's config decides whether
    # the output projection is tied.
    return evolve(text, logit_softcap=None, tie_embeddings=fields.flag("tie_word_embeddings", True))


FAMILY = DecoderFamily(
    architectures=("Gemma3ForConditionalGeneration",),
    read=_read,
    names=(
        TensorNames(body="language_model.model.", head="language_model.lm_head", norms=NORMS),
        TensorNames(body="model.language_model.", norms=NORMS),
    ),
)
