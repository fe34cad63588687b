"""Read the assistants of Gemma 4, which draft for it over its own keys and values.

Their layers are Gemma 4's, without projections to keys and values. The input of the first one is projected from the
target's embeddings and hidden states.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from attrs import evolve

from paged_sdk.config.assistant import AssistantConfig
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.gemma4_text import FAMILY as TEXT
from paged_sdk.models.gemma4_text import read_gemma4
from paged_sdk.models.tensor_names import AssistantNames

__all__ = ["FAMILY"]

_TEXT_TYPES: Final = ("gemma4_text", "gemma4_unified_text")
_UNUSUAL: Final = MappingProxyType(
    {"hidden_size_per_layer_input": 256, "enable_moe_block": False, "use_double_wide_mlp": False}
)
"""Fields that transformers refuses in an assistant unless they are 0 or false, and their defaults."""


def _read(fields: ConfigFields) -> DecoderConfig:
    section = fields.section("text_config")
    if not section.values():
        raise fields.error("text_config", "the settings of the assistant's decoder")
    if section.text("model_type", _TEXT_TYPES[0]) not in _TEXT_TYPES:
        raise section.error("model_type", " or ".join(_TEXT_TYPES))
    sizes = TEXT.sizes
    assert sizes is not None
    own = sizes.complete(section)
    for key, default in _UNUSUAL.items():
        if own.values().get(key, default):
            raise UnsupportedArchitectureError(
                f"{own.shown(key)} is not supported in an assistant: expected 0 or false",
                architecture=fields.text("model_type"),
            )
    shape = read_gemma4(own, kv_elsewhere=True)
    return evolve(
        shape,
        logit_softcap=None,  # the assistant's class has none, whatever its decoder's config says
        model_type="gemma4_assistant",
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        assistant=_read_assistant(fields, shape.vocab_size),
    )


def _read_assistant(fields: ConfigFields, vocab_size: int) -> AssistantConfig:
    target_size = fields.positive("backbone_hidden_size")
    if not fields.flag("use_ordered_embeddings", False):
        return AssistantConfig(target_size=target_size)
    count, searched = fields.positive("num_centroids", 2048), fields.positive("centroid_intermediate_top_k", 32)
    if vocab_size % count:
        raise fields.error("num_centroids", f"a divisor of vocab_size = {vocab_size}")
    if searched > count:
        raise fields.error("centroid_intermediate_top_k", f"at most num_centroids = {count}")
    return AssistantConfig(target_size=target_size, num_clusters=count, num_searched=searched)


FAMILY = DecoderFamily(
    architectures=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    read=_read,
    reads_layer_config=True,
    names=tuple(evolve(names, unused=AssistantNames().prefixes) for names in TEXT.names),
)
