"""Read Youtu-LLM: llama with latent attention."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    return read_latent(fields.with_defaults(max_position_embeddings=131_072), tie_embeddings=True)


FAMILY = DecoderFamily(
    architectures=("YoutuForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=128_256, hidden=2048, mlp=6144, layers=32, heads=16),
)
