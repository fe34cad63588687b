"""Read the text decoder of Qwen3-VL with mixtures of experts."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.qwen3_vl_text import read_qwen3_vl_text

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=16, tie_word_embeddings=True, num_experts=60, num_experts_per_tok=4
    )
    shape = read_qwen3_vl_text(fields)
    step, dense = fields.positive("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = [layer for layer in range(shape.num_layers) if layer not in dense and (layer + 1) % step == 0]
    size = fields.positive("moe_intermediate_size", 1408)
    return evolve(shape, moe=read_moe(fields, layers=layers, intermediate_size=size, renormalize=True))


FAMILY = DecoderFamily(
    architectures=("Qwen3VLMoeTextModel",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=2048, mlp=5632, layers=24, heads=16),
)
